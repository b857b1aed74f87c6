"""Adapters: each translates one foreign library and computes nothing.

The folder lies at the top of the repository and is part of the package as `collapsediag.integrations`.
"""

from __future__ import annotations

if __name__ != "collapsediag.integrations":
    raise ImportError(
        f"this package is 'collapsediag.integrations' but was imported as {__name__!r}. "
        "Use `from collapsediag.integrations.<adapter> import ...`."
    )
