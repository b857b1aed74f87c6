"""A run as one page that explains itself: data in, one HTML file out, without a network or a JavaScript library.

`page_html` is the door; `series_payload` and `scored_payload` are what it shows.
"""

from __future__ import annotations

from collapsediag.report.page import page_html
from collapsediag.report.payload import scored_payload, scored_steps, series_payload

__all__ = ["page_html", "scored_payload", "scored_steps", "series_payload"]
