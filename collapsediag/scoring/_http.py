"""POST JSON with a time-out, retries and errors that say what happened. Standard library only.

Nothing here writes the API key anywhere: not into messages, not into `repr`, not to another host.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, Any

from collapsediag.errors import ScoringError, SettingsError

# 408 and 425 ask to come again; 429 and 503 mean busy; 500, 502 and 504 come from a restarting server or its proxy.
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_WAIT_S = 60.0
EXCERPT = 300


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect becomes an error: following one would turn the POST into a GET and carry the key elsewhere."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class JsonClient:
    """One endpoint.

    url: where the JSON goes.
    api_key: sent as `Authorization: Bearer`, None for none.
    headers: sent besides.
    timeout_s: one attempt, from connecting to the last byte, takes at most about this long.
    retries: further attempts after the first.
    backoff_s: wait before the first retry; doubled each time, at most LONGEST_WAIT_S. A server's Retry-After counts
        where it is longer.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 120.0
    retries: int = 4
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"the server's address must begin with http:// or https://, found {self.url!r}.")
        if parts.username is not None or parts.password is not None:
            raise SettingsError(f"give the key as api_key, not inside the address of {parts.hostname}.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise SettingsError("api_key holds a line break or another character that no HTTP header may hold.")
        if self.timeout_s <= 0 or self.retries < 0 or self.backoff_s < 0:
            raise SettingsError(
                f"timeout_s={self.timeout_s}, retries={self.retries}, backoff_s={self.backoff_s}: the time-out must "
                "be positive and the others not negative."
            )

    def post(self, payload: Mapping[str, Any], stop: threading.Event | None = None) -> Any:
        """The parsed JSON of the reply. `stop`, once set, ends the waiting between attempts.

        Raises ScoringError naming address, status and the start of the body; temporary failures (time-outs,
        connections cut, JSON cut short, 429 and 5xx) only after the last attempt.
        """
        body = json.dumps(payload, separators=(",", ":")).encode()
        stop = threading.Event() if stop is None else stop
        failure: _AttemptError | None = None
        for attempt in range(self.retries + 1):
            if failure is not None and stop.wait(self._wait_s(attempt - 1, failure.retry_after_s)):
                break
            try:
                return self._once(body)
            except _AttemptError as error:
                failure = error
                if not failure.temporary:
                    break
        assert failure is not None
        tried = f" ({attempt + 1} attempts)" if failure.temporary else ""
        raise ScoringError(f"POST {self.url}: {failure}{tried}") from failure.__cause__

    def _wait_s(self, retry: int, asked_s: float) -> float:
        return min(LONGEST_WAIT_S, max(asked_s, self.backoff_s * 2.0**retry))

    def _once(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url, data=body, method="POST")
        for name, value in {"Content-Type": "application/json", "Accept": "application/json", **self.headers}.items():
            request.add_header(name, value)
        if self.api_key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        deadline = time.monotonic() + self.timeout_s
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout_s) as reply:
                return self._parse(_read(reply, deadline))
        except urllib.error.HTTPError as error:
            raise self._http_failure(error) from None  # its body is read; the exception would keep the socket
        except urllib.error.URLError as error:
            raise self._connection_failure(error.reason) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._connection_failure(error) from error

    def _parse(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except ValueError as error:  # UnicodeDecodeError is one as well
            raise _AttemptError(f"the reply is not JSON ({error}): {self._excerpt(raw)}", temporary=True) from None

    def _http_failure(self, error: urllib.error.HTTPError) -> _AttemptError:
        with error:
            try:
                raw = error.read(64 * 1024)
            except (OSError, http.client.HTTPException):
                raw = b""
            location = error.headers.get("Location") if 300 <= error.code < 400 else None
            where = f" to {location} (redirects are not followed; give the final address)" if location else ""
            return _AttemptError(
                f"status {error.code} {error.reason}{where}: {self._excerpt(raw)}",
                temporary=error.code in RETRIED_STATUS,
                retry_after_s=_seconds(error.headers.get("Retry-After")),
            )

    def _connection_failure(self, reason: object) -> _AttemptError:
        if isinstance(reason, TimeoutError):
            return _AttemptError(f"no full reply within {self.timeout_s:g} s", temporary=True)
        # A wrong name or certificate does not get better by waiting.
        lasting = isinstance(reason, (ssl.SSLCertVerificationError, http.client.InvalidURL)) or (
            isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN
        )
        return _AttemptError(self._hide(f"{type(reason).__name__}: {reason}"), temporary=not lasting)

    def _excerpt(self, raw: bytes) -> str:
        text = self._hide(raw.decode("utf-8", errors="replace")).strip()
        return repr(text if len(text) <= EXCERPT else text[:EXCERPT] + "...") if text else "(empty body)"

    def _hide(self, text: str) -> str:
        return text.replace(self.api_key, "***") if self.api_key else text


class _AttemptError(Exception):
    """One attempt that failed."""

    def __init__(self, message: str, *, temporary: bool, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.temporary = temporary
        self.retry_after_s = retry_after_s


def _read(reply: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body. The socket's own time-out is per read: a server that drips bytes would never meet it."""
    pieces = []
    while piece := reply.read1(1 << 20):
        pieces.append(piece)
        if time.monotonic() > deadline:
            raise TimeoutError
    # read1 ends quietly where the connection was cut; `length` is what the headers promised and did not come.
    if reply.length:
        raise http.client.IncompleteRead(b"".join(pieces), reply.length)
    return b"".join(pieces)


def _seconds(value: str | None) -> float:
    """Retry-After in seconds; its other form, a date, is left to the back-off."""
    try:
        return max(0.0, float(value or 0))
    except ValueError:
        return 0.0
