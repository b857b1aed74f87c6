"""A real server, real requests, a real browser, and a writer that is killed."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.cli import main
from collapsediag.errors import SettingsError
from collapsediag.monitor import Monitor
from collapsediag.record import Record
from collapsediag.report import scored_payload, series_payload
from collapsediag.report.live import LiveRun, LiveServer
from collapsediag.report.live_state import live_state
from collapsediag.report.tail import RecordTail
from collapsediag.run_folder import METRICS_FILE, RunStore, read_records
from collapsediag.run_writer import Writer
from collapsediag.sinks import JsonlSink
from collapsediag.testing import planted

from .chromium import chromium, needs_chromium

ROOT = Path(__file__).parents[1]


def write_steps(run: Path, steps: range, *, every: int = 2, resume: bool = False) -> None:
    healthy = planted("healthy", n_contexts=4, group_size=3)
    sink = JsonlSink(run, resume=resume)
    with Monitor(healthy.scorer(), every=every, sinks=[sink], tokenizer=healthy, on_error="raise") as monitor:
        for step in steps:
            monitor.observe(step, planted("healthy", n_contexts=4, group_size=3, step=step).batch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run: Path = tmp_path_factory.mktemp("live") / "finished"
    write_steps(run, range(6))
    return run


@contextlib.contextmanager
def served(run: Path) -> Iterator[LiveServer]:
    with LiveServer(LiveRun(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    def json(self) -> Any:
        return json.loads(self.body)


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        return Answer(connection.getresponse())
    finally:
        connection.close()


# -- the records of a growing file ---------------------------------------------------------------------------------


def line(step: int, **values: float) -> bytes:
    return json.dumps(Record(step=step, values=values, time=float(step)).to_json()).encode() + b"\n"


def shown(tail: RecordTail) -> list[tuple[int, dict[str, float]]]:
    return [(record.step, dict(record.values)) for record in tail.records]


def test_whatever_happens_to_the_file_the_tail_has_what_reading_it_whole_gives(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file, tail, step = tmp_path / METRICS_FILE, RecordTail(tmp_path), 0
    file.write_bytes(b"")
    for round_number in range(300):
        content = file.read_bytes()
        choice = rng.integers(0, 12)
        if choice < 7:
            step = int(rng.integers(0, 40)) if choice == 0 else step + 1  # 0: a rewind
            content += line(step, x=float(round_number))
        elif choice == 7:
            content += line(step, x=-1.0)[: int(rng.integers(1, 20))]  # a torn line, finished by nobody
            content += b"\n" if rng.random() < 0.5 else b""
        elif choice == 8:
            content = content[: int(rng.integers(0, len(content) + 1))]
        elif choice == 9:
            content = line(step, y=float(round_number)) * 2  # started afresh
        elif choice == 10:
            content = b"".join(line(s, z=float(round_number)) for s in range(60))  # afresh, and longer than before
        other = tmp_path / "other"
        other.write_bytes(content)
        if choice == 11:
            os.replace(other, file)  # the same content in another file
        else:
            file.write_bytes(content)
        tail.poll()
        complete = content[: content.rfind(b"\n") + 1]
        (tmp_path / "whole").mkdir(exist_ok=True)
        (tmp_path / "whole" / METRICS_FILE).write_bytes(complete)
        whole = [(r.step, dict(r.values)) for r in read_records(tmp_path / "whole")]
        assert shown(tail) == whole, (round_number, choice)


def test_what_was_read_is_not_read_again_and_half_a_line_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tail = tmp_path / METRICS_FILE, RecordTail(tmp_path)
    assert not tail.poll()  # nothing there yet
    file.write_bytes(b"".join(line(step) for step in range(5000)))
    assert tail.poll()
    parsed: list[Any] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    assert not tail.poll()
    whole = line(5000)
    with open(file, "ab") as stream:
        stream.write(whole[:10])
    assert not tail.poll()
    with open(file, "ab") as stream:
        stream.write(whole[10:])
    assert tail.poll()
    assert parsed == [whole]
    assert (len(tail.records), tail.last and tail.last.step) == (5001, 5000)
    shutil.copy(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)  # what rsync does
    assert not tail.poll()
    assert parsed == [whole]
    file.unlink()
    assert tail.poll()
    assert (tail.records, tail.poll()) == ([], False)


# -- is it still running? ------------------------------------------------------------------------------------------


def said(age: float, writer: Writer | None, gap: float = 1.0) -> tuple[str, str]:
    records = [Record(step=step, values={}, time=1000.0 + gap * step) for step in range(5)]
    last = records[-1]
    assert last.time is not None
    live = live_state(records, last, last.time, writer, last.time + age)
    return live["state"], re.sub(r"\d\d:\d\d:\d\d", "TIME", live["words"])


HERE = Writer.here()


@pytest.mark.parametrize(
    ("age", "writer", "gap", "expected"),
    [
        (3.0, HERE, 1.0, ("running", "Following the run. Last record: step 4 at TIME.")),
        (59.0, HERE, 1.0, ("running", "Following the run. Last record: step 4 at TIME.")),
        (599.0, HERE, 60.0, ("running", "Following the run. Last record: step 4 at TIME.")),
        (
            400.0,
            HERE,
            1.0,
            (
                "stopped",
                f"No record for more than 5 minutes, and its process {HERE.pid} on {HERE.host} is still there. "
                "Last record: step 4 at TIME.",
            ),
        ),
        (
            61.0,
            Writer(host="far", pid=7),
            1.0,
            (
                "stopped",
                "No record for more than 1 minute, and whether its process 7 on far runs cannot be seen from here. "
                "Last record: step 4 at TIME.",
            ),
        ),
        (
            7500.0,
            Writer(host=HERE.host, pid=HERE.pid, started="1"),
            1.0,
            (
                "stopped",
                f"The run stopped without closing: its process {HERE.pid} is gone. Last record: step 4 at TIME, "
                "more than 2 hours ago. Everything up to there is here.",
            ),
        ),
        (3.0, None, 1.0, ("stopped", "Nobody has this run open. It was last written at step 4 at TIME.")),
    ],
)
def test_what_is_said_of_a_run(age: float, writer: Writer | None, gap: float, expected: tuple[str, str]) -> None:
    assert said(age, writer, gap) == expected


# -- requests ------------------------------------------------------------------------------------------------------


def test_the_series_and_the_scored_steps_are_those_of_the_report(finished: Path) -> None:
    with served(finished) as server:
        series = ask(server, "/series.json").json()
        live = series.pop("live")
        assert series == json.loads(json.dumps(series_payload(finished)))
        assert (live["state"], live["words"][:29]) == ("stopped", "Nobody has this run open. It ")
        for step in (0, 2, 4):
            assert ask(server, f"/scored/{step}.json").json() == json.loads(json.dumps(scored_payload(finished, step)))


def test_what_has_not_changed_is_not_sent_again(finished: Path) -> None:
    with served(finished) as server:
        first = ask(server, "/series.json")
        again = ask(server, "/series.json", If_None_Match=first.headers["ETag"])
        assert (again.status, again.body) == (304, b"")
        packed = ask(server, "/series.json", Accept_Encoding="gzip, deflate")
        assert packed.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed.body) == first.body
        head = ask(server, "/series.json", "HEAD")
        assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(len(first.body)))


def test_a_run_that_grows_and_starts_afresh(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with served(run) as server:
        waiting = ask(server, "/")
        assert (waiting.status, b"Waiting for the first record of run" in waiting.body) == (200, True)
        assert ask(server, "/series.json").status == 404
        write_steps(run, range(3))
        first = ask(server, "/series.json")
        assert first.json()["steps"] == [0, 1, 2]
        write_steps(run, range(1, 6), resume=True)  # rewound by two
        deadline = time.monotonic() + 20
        while (found := ask(server, "/series.json").json())["steps"] != list(range(6)):
            assert time.monotonic() < deadline
        assert found["scored_steps"] == [0, 1, 2, 4]
        shutil.rmtree(run)
        assert ask(server, "/series.json").status == 404
        write_steps(run, range(10, 12))
        deadline = time.monotonic() + 20
        while ask(server, "/series.json").status != 200 or ask(server, "/series.json").json()["steps"] != [10, 11]:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "evil@localhost", "", "localhost:80, a"],
)
def test_a_name_that_is_not_this_machines_is_refused(finished: Path, host: str) -> None:
    with served(finished) as server:
        for path in ("/", "/series.json", "/scored/0.json"):
            answer = ask(server, path, Host=host)
            assert (answer.status, answer.body[:20]) == (403, b"this server answers ")
        for name in ("localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:8611"):
            assert ask(server, "/series.json", Host=name).status == 200


def test_two_hosts_or_none_are_refused(finished: Path) -> None:
    with served(finished) as server:
        for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
                connection.sendall(b"GET /series.json HTTP/1.1\r\nConnection: close\r\n" + hosts + b"\r\n")
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "path",
    [
        "/../run.json",
        "/scored/../../run.json",
        "/scored/..%2f..%2frun.json",
        "/run.json",
        "/metrics.jsonl",
        "/scored/",
        "/matrices/000000000-first_turn.npz",
        "/scored/1.json",
        "/scored/-0.json",
        "/scored/0.json/",
        "/scored/9999999999999.json",
        "//evil.example/",
        "http://evil.example/",
        "/etc/passwd",
        "*",
    ],
)
def test_there_is_nothing_but_the_three_documents(finished: Path, path: str) -> None:
    with served(finished) as server:
        ask(server, "/series.json")
        answer = ask(server, path, Host="localhost")
        assert (answer.status, answer.body) == (404, b"no such document\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_but_reading_is_allowed(finished: Path, method: str) -> None:
    with served(finished) as server:
        answer = ask(server, "/series.json", method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_every_answer_forbids_what_a_page_of_numbers_does_not_need(finished: Path) -> None:
    with served(finished) as server:
        for path, method in (("/", "GET"), ("/series.json", "GET"), ("/nothing", "GET"), ("/", "POST"), ("/", "FOO")):
            headers = ask(server, path, method).headers
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert headers["Access-Control-Allow-Origin"] is None
        policy = ask(server, "/").headers["Content-Security-Policy"]
        assert "connect-src 'self'" in policy
        assert "script-src 'sha256-" in policy
        # Nobody but this machine.
        assert server.server_address[0] == "127.0.0.1"


def test_what_is_no_request_gets_an_answer_without_markup(finished: Path) -> None:
    with served(finished) as server:
        for noise in (b"<script>\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
                connection.sendall(noise)
                answer = connection.recv(1 << 16)
            assert re.match(rb"HTTP/1.1 (400|414|505) ", answer), answer
            assert b"text/plain" in answer
            assert b"script" not in answer
        assert ask(server, "/series.json").status == 200


def test_a_damaged_run_is_told_and_served_again_once_it_is_whole(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    about = (run / "run.json").read_bytes()
    (run / "run.json").write_bytes(b"{")
    with served(run) as server:
        answer = ask(server, "/series.json")
        assert answer.status == 503
        assert b"run.json" in answer.body
        (run / "run.json").write_bytes(about)
        assert ask(server, "/series.json").status == 200


def test_a_long_run_does_not_keep_a_core_busy(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import collapsediag.report.live as module

    shutil.copytree(finished, tmp_path / "run")
    made: list[float] = []

    def slow(*args: Any, **options: Any) -> dict[str, Any]:
        made.append(time.monotonic())
        time.sleep(0.1)
        return series_payload(*args, **options)

    monkeypatch.setattr(module, "series_payload", slow)
    live = LiveRun(tmp_path / "run")
    with RunStore(tmp_path / "run", resume=True) as store:
        for step in range(100, 130):
            store.append(Record(step=step, values={"x": 1.0}))
            live.series()
            time.sleep(0.05)
    assert 2 <= len(made) < 30
    assert min(np.diff(made)) >= 1.0  # ten times what it takes


# -- the command ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(run: Path, waiting: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`collapsediag dashboard RUN` and the address that it gives."""
    arguments = [sys.executable, "-m", "collapsediag", "dashboard", str(run), "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    # A shell's background jobs, and all that they start, ignore Ctrl-C.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(arguments, **pipes) as process:
        try:
            lines = [process.stdout.readline() for _ in range(4)]  # type: ignore[union-attr]
            found = re.fullmatch(rf"Following {run}{waiting}: (http://127\.0\.0\.1:(\d+)/)\n", lines[0])
            assert found, lines
            assert lines[2].startswith(f"    ssh -N -L {found[2]}:127.0.0.1:{found[2]} ")
            yield process, found[1]
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_the_command_says_where_the_page_is_and_ends_cleanly_when_interrupted(finished: Path) -> None:
    with command(finished) as (process, url):
        connection = http.client.HTTPConnection(url.split("/")[2], timeout=60)
        connection.request("GET", "/series.json")
        assert json.loads(connection.getresponse().read())["steps"] == list(range(6))
        assert interrupted(process) == (0, "\nno longer following\n", "")  # with a connection still open
        connection.close()


def test_a_name_that_is_not_there_yet_is_followed_and_said_not_to_be_there(tmp_path: Path) -> None:
    with command(tmp_path / "typo", ", which does not exist yet") as (process, _):
        assert interrupted(process)[0] == 0
    waiting = f", which does not exist yet, and neither does {tmp_path / 'runz'}"
    with command(tmp_path / "runz" / "mine", waiting) as (process, _):
        assert interrupted(process)[0] == 0
    assert not (tmp_path / "runz").exists()


def test_a_folder_of_runs_is_refused_and_its_runs_are_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        shutil.copytree(finished, tmp_path / name)
    assert main(["dashboard", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} is not a run folder: it has no metrics.jsonl" in said
    assert f"Run folders in it: {tmp_path / 'a'}, {tmp_path / 'b'}." in said


def test_a_port_that_is_taken_and_a_file_in_place_of_a_folder(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dashboard", str(finished), "--port", str(port)]) == 2
        assert f"port {port} cannot be had (Address already in use); choose another one" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="port 99999 cannot be had"):
        LiveServer(LiveRun(finished), 99_999)
    (tmp_path / "file").write_bytes(b"")
    assert main(["dashboard", str(tmp_path / "file")]) == 2
    assert "file is a file; a run folder is needed" in capsys.readouterr().err


# -- in the browser ------------------------------------------------------------------------------------------------

WRITER = """
    import sys, time
    from collapsediag.monitor import Monitor
    from collapsediag.sinks import JsonlSink
    from collapsediag.testing import planted
    healthy = planted("healthy", n_contexts=4, group_size=3)
    monitor = Monitor(healthy.scorer(), every=1, sinks=[JsonlSink(sys.argv[1], resume=True)], tokenizer=healthy)
    for step in range(int(sys.argv[2]), 10_000):
        monitor.observe(step, planted("healthy", n_contexts=4, group_size=3, step=step).batch)
        print(step, flush=True)
        time.sleep(0.2)
"""


@contextlib.contextmanager
def writing(run: Path, first: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(run), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.browser
@needs_chromium
def test_a_page_follows_a_run_sees_it_killed_and_sees_it_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shown_step = "document.querySelector('#step').textContent"
    words = "document.querySelector('.live')?.textContent"
    with served(run) as server, chromium(tmp_path) as browser:
        browser.open(server.url, ready="document.title.startsWith('waiting for')")
        with writing(run, 0) as process:
            assert process.stdout is not None
            process.stdout.readline()
            browser.wait("document.body.dataset.ready")  # the waiting page looked again
            browser.wait(f"{words}?.startsWith('Following the run.')")
            seen = browser.evaluate(shown_step)
            browser.wait(f"{shown_step} !== {json.dumps(seen)}")  # the last step moves with the run
            process.kill()
            process.wait()
            told = [int(text) for text in process.stdout.read().split()]
        browser.wait(f"{words}?.includes('its process {process.pid} is gone')")
        written = [record.step for record in read_records(run)]
        assert written[-1] in (told[-1], told[-1] + 1)  # killed before it could say so
        assert written == list(range(len(written)))
        browser.wait(f"{shown_step} === 'step {written[-1]}'")
        assert ask(server, "/series.json").json()["steps"] == written
        # Restarted from an earlier step, in the same folder.
        with writing(run, written[-1] - 1) as process:
            browser.wait(f"{words}?.startsWith('Following the run.')")
            browser.wait(f"parseInt({shown_step}.slice(5)) > {written[-1]}")
        hosts = {re.sub(r"(https?://[^/]*).*", r"\1", url) for url in browser.requests()}
        assert hosts <= {server.url.rstrip("/"), "data:,"}
        assert browser.problems() == []


@pytest.mark.browser
@needs_chromium
def test_a_page_whose_server_ends_keeps_what_it_shows_and_says_so(finished: Path, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        with command(finished) as (process, url):
            browser.open(url)
            assert browser.evaluate("document.querySelector('#step').textContent") == "step 4"
            assert interrupted(process) == (0, "\nno longer following\n", "")
        browser.wait("document.querySelector('#news').textContent.startsWith('The server does not answer')")
        assert browser.evaluate("document.querySelectorAll('.chart').length") > 5
