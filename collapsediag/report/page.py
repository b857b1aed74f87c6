"""The page: assets of this package and data of a run, put together into one HTML file.

Model output is data here and never markup: it travels compressed inside inert script elements, is decoded by the page's
own script, and reaches the document as text alone. The content security policy names that one script by its hash,
refuses every other one, and allows no request at all (a page that follows a job may ask its own server).
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from collapsediag.plain_text import printable

# Concatenated in this order into one script.
SCRIPTS = (
    "dom.js", "data.js", "state.js", "curves.js", "charts.js", "regime.js", "heatmap.js", "traces.js", "verdict.js",
    "tables.js", "app.js",
)  # fmt: skip
MAX_BYTES = 10_000_000
_PLACE = re.compile(r"@@([A-Z]+)@@")


def page_html(
    series_list: Sequence[Mapping[str, Any]],
    scored: Sequence[Sequence[Mapping[str, Any]]] = (),
    *,
    comparison: Mapping[str, Any] | None = None,
    live: bool = False,
) -> str:
    """The page, one self-contained HTML document.

    series_list: a `series_payload` for each run. scored: for each run its `scored_payload`s, of as many steps as the
        page is to hold; where they would make it larger than 10 MB, steps are thinned evenly and the page says so.
    comparison: `Comparison.to_json()` of the runs, for several.
    live: the page holds no scored steps, asks its server for them, and follows `series.json`.

    >>> "connect-src 'self'" in page_html([], live=True), "connect-src 'self'" in page_html([])
    (True, False)
    """
    script = "".join(("(()=>{'use strict';\n", *(_asset(name) for name in SCRIPTS), "})();\n"))
    style = _asset("style.css")
    series = _block("series", {"runs": list(series_list), "comparison": comparison, "live": live})
    blocks = () if live else _fitting(scored, MAX_BYTES - len(series) - len(script) - len(style))
    title = ", ".join(str(one["name"]) for one in series_list) or "collapsediag"
    parts = {
        "TITLE": html.escape(printable(title)),
        "POLICY": _policy(script, style, live=live),
        "STYLE": style,
        "DATA": "\n".join((series, *blocks)),
        "SCRIPT": script,
    }
    # One pass: what is put in is never looked at again.
    return _PLACE.sub(lambda match: parts[match[1]], _asset("page.html"))


def _policy(script: str, style: str, *, live: bool) -> str:
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _asset(name: str) -> str:
    return (importlib.resources.files("collapsediag.report") / "assets" / name).read_text(encoding="utf-8")


def _block(name: str, value: Any) -> str:
    """Data as base64 of zlib of JSON: small, and made of letters that mean nothing to an HTML parser."""
    packed = zlib.compress(json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii"), 6)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode("ascii")}</script>'


def _fitting(scored: Sequence[Sequence[Mapping[str, Any]]], limit: int) -> list[str]:
    """The scored steps as blocks; of the run with the most, every other one while all of them would be too large."""
    blocks = [[_block(f"scored-{run}-{one['step']}", one) for one in steps] for run, steps in enumerate(scored)]
    while sum(len(block) for run in blocks for block in run) > limit:
        longest = max(blocks, key=len, default=[])
        if len(longest) < 2:
            break
        # Counted from the last step, which stays: it is what the verdict is about.
        longest[:] = longest[::-1][::2][::-1]
    return [block for run in blocks for block in run]
