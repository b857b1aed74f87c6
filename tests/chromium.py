"""A headless Chromium driven over its debugging pipe, with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
READY = "document.body.dataset.ready"
SECONDS = 90  # for one answer: other tests may have all the cores


class Chromium:
    """One browser with one page at a time."""

    def __init__(self, folder: Path) -> None:
        assert EXECUTABLE is not None
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        # High numbers first: 3 and 4 are where the browser looks, and either may be one of these.
        actions = [(os.POSIX_SPAWN_DUP2, child_in, 93), (os.POSIX_SPAWN_DUP2, child_out, 94)]
        actions += [(os.POSIX_SPAWN_DUP2, 93, 3), (os.POSIX_SPAWN_DUP2, 94, 4)]
        log = str(folder / "chromium.log")
        actions += [(os.POSIX_SPAWN_OPEN, fd, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for fd in (1, 2)]
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        options += ["--disable-background-networking", "--no-first-run", "--disable-extensions", "--disable-sync"]
        options += [f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._pid = os.posix_spawn(EXECUTABLE, [EXECUTABLE, *options], os.environ, file_actions=actions, setpgroup=0)
        os.close(child_in)
        os.close(child_out)
        self._buffer = b""
        self._id = 0
        self._session: str | None = None
        self._target: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its answer."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            chunk = os.read(self._from, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium has ended")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))

    def open(self, url: str, *, width: int = 1280, height: int = 900, ready: str = READY) -> None:
        """A new page at `url`, until `ready` is true. Events so far are forgotten."""
        self._session = None
        before, self._target = self._target, self.call("Target.createTarget", url="about:blank")["targetId"]
        if before is not None:
            self.call("Target.closeTarget", targetId=before)
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        self.wait(ready)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression, once it is true."""
        deadline = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(RuntimeError):  # the page is just being replaced
                if value := self.evaluate(expression):
                    return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} stays false; {self.problems()}")
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", clickCount=1)
        self.mouse("mouseMoved", *end, button="left")
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def click(self, selector: str) -> None:
        x, y, width, height = self.box(selector)
        place = (x + width / 2, y + height / 2)
        self.drag(place, place)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """x, y, width and height of an element, scrolled into sight."""
        found = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}}); const b = e.getBoundingClientRect();"
            f" return [b.x, b.y, b.width, b.height]; }})(document.querySelector({json.dumps(selector)}))"
        )
        return (found[0], found[1], found[2], found[3])

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def screenshot(self, path: Path, *, full: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))

    def of(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of one kind since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def requests(self) -> list[str]:
        """Addresses the page asked for, its own included."""
        return [event["request"]["url"] for event in self.of("Network.requestWillBeSent")]

    def problems(self) -> list[str]:
        """Errors and warnings of the console, and exceptions."""
        self.evaluate("0")  # whatever was on its way has arrived before this answer
        bad = ("error", "warning")
        said = [str(event["args"]) for event in self.of("Runtime.consoleAPICalled") if event["type"] in bad]
        thrown = [str(event["exceptionDetails"]) for event in self.of("Runtime.exceptionThrown")]
        logged = [event["entry"]["text"] for event in self.of("Log.entryAdded") if event["entry"]["level"] in bad]
        return said + thrown + logged

    def close(self) -> None:
        """End the browser, kindly at first: killed at once it would leave folders behind."""
        self._session = None
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.05)
        os.close(self._to)
        os.close(self._from)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    browser = Chromium(folder)
    try:
        yield browser
    finally:
        browser.close()
