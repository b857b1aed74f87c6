"""A page that follows a run: its documents, made anew when there is something new, and the server that hands them out.

The server is for the person at this machine: it listens on the loopback address alone and answers only who calls it by
a loopback name, so that no web page can reach it under a name of its own. It knows three documents, and no path of a
request ever becomes a path of a file.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import os
import re
import socketserver
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from collapsediag.errors import CollapsediagError, SettingsError
from collapsediag.report.live_state import live_state
from collapsediag.report.page import page_html
from collapsediag.report.payload import scored_payload, series_payload
from collapsediag.report.tail import RecordTail
from collapsediag.run_writer import writer_of

LOOPBACK = "127.0.0.1"
# A long run costs a second to judge and to write out: nine times as long nothing is made anew.
REST = 9.0
_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_SCORED = re.compile(r"/scored/([0-9]{1,12})\.json")
_POLICY = re.compile(r'http-equiv="Content-Security-Policy" content="([^"]*)"')
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Kept by the browser, and asked about each time.
    "Cache-Control": "no-cache",
}
_NOTHING = "default-src 'none'; frame-ancestors 'none'"
_WAITING = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<meta name="color-scheme" content="light dark"><title>waiting for {name}</title>
<p>Waiting for the first record of {name}. This page looks again every two seconds.</p></html>
"""


@dataclass(frozen=True, eq=False)
class Document:
    """What is sent: a body with the policy that goes with it."""

    body: bytes
    kind: str
    policy: str = _NOTHING

    @cached_property
    def tag(self) -> str:
        """ETag: equal for equal bodies."""
        return f'"{hashlib.blake2b(self.body, digest_size=16).hexdigest()}"'

    @cached_property
    def packed(self) -> bytes:
        """The body under gzip."""
        return gzip.compress(self.body, 4, mtime=0)

    @classmethod
    def of_json(cls, value: Any) -> Document:
        """Plain JSON values as ASCII."""
        return cls(json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii"), "application/json")


class LiveRun:
    """The documents of a run that may still be growing.

    run: the run folder; where it holds no record yet, there is no series, and the page waits.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.run = Path(run)
        self._tail = RecordTail(run)
        self._lock = threading.Lock()
        self._payload: dict[str, Any] | None = None
        self._series: Document | None = None
        self._is_behind = False
        self._rested = 0.0

    def series(self) -> Document | None:
        """`series.json`; None before the first record."""
        with self._lock:
            self._refresh()
            return self._series

    def page(self) -> Document:
        """The page, with the series as it is now inside."""
        with self._lock:
            self._refresh()
            payload = self._payload
        if payload is None:
            name = html.escape(self.run.absolute().name)
            return Document(_WAITING.format(name=name).encode("utf-8", "replace"), "text/html; charset=utf-8")
        text = page_html([payload], live=True)
        found = _POLICY.search(text)
        policy = f"{html.unescape(found[1])}; frame-ancestors 'none'" if found else _NOTHING
        return Document(text.encode("utf-8", "replace"), "text/html; charset=utf-8", policy)

    def scored(self, step: int) -> Document | None:
        """`scored/STEP.json`; None for a step that the series does not name."""
        with self._lock:
            known = () if self._payload is None else self._payload["scored_steps"]
        return Document.of_json(scored_payload(self.run, step)) if step in known else None

    def _refresh(self) -> None:
        self._is_behind |= self._tail.poll()
        last = self._tail.last
        if last is None:
            self._payload = self._series = None
            return
        records = self._tail.records
        live = live_state(records, last, self._written(), writer_of(self.run), time.time())
        is_news = self._payload is None or live != self._payload["live"]
        if not (self._is_behind or is_news) or time.monotonic() < self._rested:
            return
        begun = time.monotonic()
        self._payload = {**series_payload(self.run, records=records), "live": live}
        self._series = Document.of_json(self._payload)
        self._is_behind = False
        now = time.monotonic()
        self._rested = now + REST * (now - begun)

    def _written(self) -> float:
        last = self._tail.last
        if last is not None and last.time is not None:
            return last.time
        return self._tail.path.stat().st_mtime


class LiveServer(ThreadingHTTPServer):
    """Serves a `LiveRun` on the loopback address; `serve_forever()` until interrupted, then `server_close()`.

    port: 0 takes a free one. Raises SettingsError where it cannot be had.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, run: LiveRun, port: int) -> None:
        self.live_run = run
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"port {port} cannot be had ({reason}); choose another one, or 0 for any.") from error

    def server_bind(self) -> None:
        """Without asking a name server for the machine's full name, which can take a minute."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "collapsediag", ""
    timeout = 60  # seconds that an idle connection is kept

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _refuse(self) -> None:
        self.close_connection = True  # whatever the request carries is not read
        self._send(405, Document(b"only GET and HEAD\n", "text/plain"), {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, *, with_body: bool) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].strip()):
            self._send(403, _text("this server answers under localhost and 127.0.0.1 only"), with_body=with_body)
            return
        try:
            found = self._document(self.path.partition("?")[0])
        except (CollapsediagError, OSError) as error:
            self._send(503, _text(f"the run cannot be read: {error}"), with_body=with_body)
            return
        if isinstance(found, str):
            self._send(404, _text(found), with_body=with_body)
        elif found.tag in (self.headers.get("If-None-Match") or ""):
            self._send(304, found, with_body=False)
        else:
            self._send(200, found, with_body=with_body)

    def _document(self, path: str) -> Document | str:
        """What is asked for, or why there is none."""
        run = cast(LiveServer, self.server).live_run
        if path == "/":
            return run.page()
        if path == "/series.json":
            return run.series() or "no step has been recorded yet"
        step = _SCORED.fullmatch(path)
        return (step and run.scored(int(step[1]))) or "no such document"

    def _send(
        self, status: int, document: Document, extra: dict[str, str] | None = None, *, with_body: bool = True
    ) -> None:
        is_packed = status == 200 and "gzip" in self.headers.get("Accept-Encoding", "")
        body = document.packed if is_packed else document.body
        headers = {**_HEADERS, "Content-Security-Policy": document.policy, **(extra or {})}
        if status in (200, 304):
            headers.update({"ETag": document.tag, "Vary": "Accept-Encoding"})
        if status != 304:
            headers.update({"Content-Type": document.kind, "Content-Length": str(len(body))})
        if is_packed:
            headers["Content-Encoding"] = "gzip"
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the browser has gone; it may ask again

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For requests that are no requests: as every other answer, and without quoting them."""
        self.close_connection = True
        self.request_version = self.protocol_version  # else no header would be sent
        self.headers = getattr(self, "headers", None) or self.MessageClass()
        self._send(code, _text(self.responses[HTTPStatus(code)][0]))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every few seconds."""


def _text(words: str) -> Document:
    return Document(f"{words}\n".encode("utf-8", "replace"), "text/plain; charset=utf-8")
