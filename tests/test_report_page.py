"""The page as a file: self-contained, guarded by its policy, data inert; and the command that writes it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import importlib.resources
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.cli import main
from collapsediag.cli.report import MAX_SCORED, build_page
from collapsediag.record import Record
from collapsediag.report import page_html, scored_payload, series_payload
from collapsediag.report.page import MAX_BYTES, SCRIPTS
from collapsediag.run_folder import RunStore

from .report_runs import write_run

ASSETS = importlib.resources.files("collapsediag.report").joinpath("assets")


class Parts(html.parser.HTMLParser):
    """The elements of a page: scripts by id, the policy, the style, the addresses it names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy = ""
        self.style = ""
        self.addresses: list[str] = []
        self._open: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self._open = tag
        if tag == "script":
            self.scripts.append((named, ""))
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"] or ""
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open == "style":
            self.style += data

    def data(self, name: str) -> Any:
        (text,) = (text for attributes, text in self.scripts if attributes.get("id") == name)
        return json.loads(zlib.decompress(base64.b64decode(text)))


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("page") / "run")


def test_one_script_runs_and_the_policy_names_it_by_its_hash(folder: Path) -> None:
    parts = Parts(build_page([str(folder)]))
    (script,) = (text for attributes, text in parts.scripts if "type" not in attributes)
    assert f"script-src {sha256(script)};" in parts.policy
    assert f"style-src {sha256(parts.style)};" in parts.policy
    for rule in ("default-src 'none'", "connect-src 'none'", "base-uri 'none'", "form-action 'none'"):
        assert rule in parts.policy
    assert "unsafe" not in parts.policy
    assert parts.addresses == ["data:,"]  # the icon, so that no browser asks for one


def test_the_data_comes_back_as_it_was(folder: Path) -> None:
    series = series_payload(folder)
    parts = Parts(page_html([series], [[scored_payload(folder, 80)]]))
    assert parts.data("series") == json.loads(json.dumps({"runs": [series], "comparison": None, "live": False}))
    assert parts.data("scored-0-80") == scored_payload(folder, 80)


def test_a_live_page_holds_no_scored_step_and_may_ask_its_own_server_alone(folder: Path) -> None:
    parts = Parts(page_html([series_payload(folder)], live=True))
    assert [attributes["id"] for attributes, _ in parts.scripts if "id" in attributes] == ["series"]
    assert "connect-src 'self';" in parts.policy


def test_names_are_text_and_places_are_filled_once(folder: Path) -> None:
    series = {**series_payload(folder), "name": "</title><script>1</script>@@SCRIPT@@\u202e\ud800"}
    page = page_html([series])
    head = page[: page.index("<style>")]
    assert "<title>&lt;/title&gt;&lt;script&gt;1&lt;/script&gt;@@SCRIPT@@\\u202e\\ud800</title>" in head
    assert page.encode("utf-8")


def test_the_same_run_gives_the_same_bytes(folder: Path) -> None:
    assert build_page([str(folder)]) == build_page([str(folder)])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_text_only_through_text_nodes(name: str) -> None:
    source = ASSETS.joinpath(name).read_text(encoding="utf-8")
    code = re.sub(r"//.*", "", source)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|createContextualFragment|srcdoc"
        r"|parseFromString|setAttribute\('(?:style|on)",
        code,
    )
    assert "</script" not in source.lower()
    assert "<!--" not in source
    assert len(source.splitlines()) <= 400


def contrast(one: str, other: str) -> float:
    """WCAG 2.1 contrast ratio of two #rrggbb (or #rgb) colours."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        linear = []
        for start in (0, 2, 4):
            share = int(digits[start : start + 2], 16) / 255
            linear.append(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_stand_out_from_the_paper_in_every_theme() -> None:
    style = ASSETS.joinpath("style.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block)) for block in re.findall(r"\{[^{}]+\}", style)]
    themes = [theme for theme in themes if "paper" in theme]
    assert len(themes) == 4  # light, dark by the system, dark by choice, print
    assert themes[1] == themes[2]
    names = [
        "ink",
        "soft",
        "bad",
        "warn",
        "good",
        "main",
        "second",
        "third",
        "fourth",
        "fifth",
        "sixth",
        "seventh",
        "reference",
    ]
    for theme in themes:
        for name in names:
            assert contrast(theme[name], theme["paper"]) >= 4.5, (name, theme[name], theme["paper"])


def test_no_asset_is_left_out_of_the_page() -> None:
    scripts = {file.name for file in ASSETS.iterdir() if file.name.endswith(".js")}
    assert scripts == set(SCRIPTS)
    page = page_html([])
    ids = set(re.findall(r'id="([\w-]+)"', page))
    asked = {name for file in SCRIPTS for name in re.findall(r"byId\('([\w-]+)'\)", ASSETS.joinpath(file).read_text())}
    assert asked <= ids, asked - ids


def test_a_page_that_would_be_too_large_keeps_evenly_spaced_steps_and_the_last() -> None:
    rng = np.random.default_rng(0)
    noise = [base64.b64encode(rng.bytes(450_000)).decode() for _ in range(30)]
    scored = [{"step": step, "noise": text} for step, text in enumerate(noise)]
    page = page_html([], [scored])
    steps = [int(step) for step in re.findall(r'id="scored-0-(\d+)"', page)]
    assert steps == list(range(1, 30, 2))
    assert MAX_BYTES * 0.6 < len(page) <= MAX_BYTES


def test_a_series_that_is_too_large_alone_is_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapsediag.report.page.MAX_BYTES", 0)
    assert Parts(page_html([])).data("series")["runs"] == []


def test_the_command_writes_a_page_of_several_runs(folder: Path, tmp_path: Path, capsys: Any) -> None:
    other = write_run(tmp_path / "run", reward=0.8)
    third = write_run(tmp_path / "c", reward=0.2)
    out = tmp_path / "out.html"
    assert main(["report", str(folder), str(other), str(third), "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    data = Parts(out.read_text(encoding="utf-8")).data("series")
    names = [run["name"] for run in data["runs"]]
    assert names == [f"{folder.parent.name}/run", f"{tmp_path.name}/run", f"{tmp_path.name}/c"]
    assert data["comparison"]["outcome"] == "reward/mean"
    assert not list(tmp_path.glob("*.tmp"))


def test_runs_without_a_common_outcome_are_shown_without_correlations(folder: Path, tmp_path: Path) -> None:
    with RunStore(tmp_path / "bare") as store:
        store.append(Record(step=0, values={"length/mean": 1.0}))
    data = Parts(build_page([str(folder), str(tmp_path / "bare")])).data("series")
    assert data["comparison"] is None
    assert len(data["runs"]) == 2


def test_errors_are_one_line_and_leave_an_older_page_alone(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "report.html"
    out.write_text("older")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    for arguments, said in (
        (["report", str(tmp_path / "nowhere"), "-o", str(out)], "nowhere is not a run folder: it does not exist."),
        (
            ["report", str(tmp_path), "-o", str(out)],
            f"it has no metrics.jsonl. Run folders in it: {tmp_path / 'empty'}, {tmp_path / 'run'}.",
        ),
        (["report", str(tmp_path / "empty"), "-o", str(out)], "no step has been recorded yet"),
        (["report", str(write_run(tmp_path / "run")), "-o", str(tmp_path)], "is a folder; --out is the file"),
        (["report", str(tmp_path / "run"), "-o", str(tmp_path / "no" / "where.html")], "cannot be written"),
        (["report", str(tmp_path / "run"), "-o", str(tmp_path / ("a" * 300))], "written (File name too long)"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.strip().splitlines()) == 1
    assert out.read_text() == "older"
    assert sorted(os.listdir(tmp_path)) == ["empty", "report.html", "run"]


def test_a_link_to_a_page_stays_a_link(tmp_path: Path) -> None:
    """As /dev/stdout is, where it leads to a file."""
    (tmp_path / "page.html").write_text("older")
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    assert main(["report", str(write_run(tmp_path / "run")), "-o", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_of_many_scored_steps_evenly_spaced_ones_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setattr("collapsediag.cli.report.MAX_SCORED", 3)
    page = build_page([str(run)])
    assert [int(s) for s in re.findall(r'id="scored-0-(\d+)"', page)] == [0, 40, 80]
    assert MAX_SCORED >= 50
