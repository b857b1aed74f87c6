"""The W&B workspace through the real packages; only W&B's server is played, on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from collapsediag.chart_layout import MATRIX_CHARTS, ROLLOUT_CATEGORIES
from collapsediag.errors import MissingExtraError
from collapsediag.findings.settings import FindingSettings
from collapsediag.integrations import wandb_workspace as board
from collapsediag.integrations.wandb_sink import STEP
from collapsediag.metrics.registry import unknown_names
from collapsediag.monitor import Monitor
from collapsediag.testing import planted
from collapsediag.tracker_values import tracker_values

from .conftest import import_or_skip

KEY = "collapse_first_turn_sample/"
VIEWER = {
    "__typename": "User", "id": "VXNlcjox", "entity": "team", "username": "u", "flags": "{}", "email": "u@example.org",
    "admin": False, "name": "u", "deletedAt": None, "accountType": "x", "teams": {"edges": []},
    "apiKeys": {"edges": []},
}  # fmt: skip
PROJECT = {
    "__typename": "Project", "id": "p1", "name": "proj", "entityName": "team", "createdAt": "2026-01-01",
    "isBenchmark": False, "user": None,
}  # fmt: skip


class Server(ThreadingHTTPServer):
    """W&B's GraphQL endpoint as far as it is asked here. `answers` replaces an operation's data, or is its error."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = {"Viewer": {"viewer": VIEWER}, "GetProject": {"project": PROJECT}, **answers}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((operation, variables))
        default: dict[str, Any] = {
            "UpsertView2": {"upsertView": {"view": {"id": "v1", "name": variables.get("name")}, "inserted": True}},
            "CreateCustomChart": {"createCustomChart": {"chart": {"id": f"team/{variables.get('chartName')}"}}},
        }
        found = self.answers.get(operation, default.get(operation, {}))
        return {"errors": [{"message": found}]} if isinstance(found, str) else {"data": found}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"]))) if self.path == "/graphql" else {}
        (operation,) = re.findall(r"(?:query|mutation)\s+(\w+)", body["query"])[:1] if body else ("",)
        content = json.dumps(self.server.answer(operation, body.get("variables") or {}) if body else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextlib.contextmanager
def serving(**answers: Any) -> Iterator[Server]:
    server = Server(**answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def command(folder: Path, port: int, *arguments: str, key: str | None = "local-" + "0" * 40) -> Any:
    """`collapsediag wandb-workspace` in a process of its own: W&B reads its environment once."""
    import_or_skip("wandb_workspaces")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env = {
        **kept, "WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_DIR": str(folder), "NETRC": str(folder / "netrc"),
        "WANDB_CONFIG_DIR": str(folder), "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true",
    }  # fmt: skip
    if key is not None:
        env["WANDB_API_KEY"] = key
    line = [sys.executable, "-m", "collapsediag", "wandb-workspace", "team", "proj", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=300, check=False)


def panels(spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {section["name"]: section["panels"] for section in spec["section"]["panelBankConfig"]["sections"]}


def test_the_command_saves_the_workspace_and_its_chart(tmp_path: Path) -> None:
    with serving() as server:
        done = command(tmp_path, server.server_port)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"saved: http://127\.0\.0\.1:{server.server_port}/team/proj\?nw=\w+\n", done.stdout)
    asked = dict(server.asked)
    assert asked["GetProject"] == {"name": "proj", "entity": "team"}
    chart = asked["CreateCustomChart"]
    assert (chart["entity"], chart["chartName"], chart["access"]) == ("team", board.CHART_NAME, "PRIVATE")
    assert json.loads(chart["spec"]) == board.regime_map()
    view = asked["UpsertView2"]
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "proj", "Collapse diagnostics")
    spec = json.loads(view["spec"])
    assert panels(spec)["Regime map and matrix"][0]["config"]["panelDefId"] == f"team/{board.CHART_NAME}"
    assert spec["section"]["settings"]["xAxis"] == STEP


def test_a_dry_run_asks_nobody(tmp_path: Path) -> None:
    with serving() as server:
        done = command(tmp_path, server.server_port, "--dry-run", key=None)
    assert (done.returncode, server.asked) == (0, []), done.stderr
    sent = json.loads(done.stdout)
    assert (sent["entity"], sent["project"]) == ("team", "proj")
    titles = list(panels(sent["spec"]))
    assert titles[:2] == ["Input dependence, first turn", "Regime map and matrix"]
    assert titles[4:7] == [category.title for category in ROLLOUT_CATEGORIES]
    first = panels(sent["spec"])["Input dependence, first turn"]
    assert [panel["config"]["chartTitle"] for panel in first][: len(MATRIX_CHARTS)] == [
        chart.heading() for chart in MATRIX_CHARTS
    ]
    assert first[1]["config"]["metrics"] == [
        f"{KEY}retrieval_accuracy", f"{KEY}retrieval_accuracy/ci_low", f"{KEY}retrieval_accuracy/ci_high"
    ]  # fmt: skip


def test_every_line_is_registered_drawn_over_our_step_and_logged_by_a_real_run() -> None:
    import_or_skip("wandb_workspaces")
    spec = board.workspace_spec(board.build_workspace("team", "proj"))
    lines = [p for found in panels(spec).values() for p in found if p["viewType"] == "Run History Line Plot"]
    assert {panel["config"]["xAxis"] for panel in lines} == {STEP}
    names = {name for panel in lines for name in panel["config"]["metrics"]}
    assert unknown_names(names) == []
    step = planted("healthy")
    monitor = Monitor(step.scorer(), every=1, sinks=[], tokenizer=step, on_error="raise")
    logged = set(tracker_values(monitor.observe(0, step.batch)))
    drawn = {name for panel in panels(spec)["Input dependence, first turn"] for name in panel["config"]["metrics"]}
    # What a budget, tools or entropies of the policy would add is not in this run.
    assert {name for name in drawn - logged if "subset" not in name} == set()


@pytest.mark.parametrize(
    ("answers", "key", "said"),
    [
        ({}, None, "W&B knows no login"),
        pytest.param(
            {"Viewer": "user is not logged in"}, "local-" + "0" * 40, "knows no login", marks=pytest.mark.slow
        ),
        ({"GetProject": {"project": None}}, "local-" + "0" * 40, "W&B has no project 'team/proj'"),
        ({"UpsertView2": "permission denied"}, "local-" + "0" * 40, "did not save the workspace in 'team/proj'"),
    ],
    ids=["no login", "login refused", "no project", "not saved"],
)
def test_what_w_and_b_refuses_is_said_in_one_message(
    tmp_path: Path, answers: dict[str, Any], key: str | None, said: str
) -> None:
    with serving(**answers) as server:
        done = command(tmp_path, server.server_port, key=key)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_network_it_says_so_at_once(tmp_path: Path) -> None:
    with serving() as server:
        port = server.server_port
    done = command(tmp_path, port)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: W&B is not reached at http://127.0.0.1:{port}: " in done.stderr
    assert "refused" in done.stderr


def test_a_preset_that_is_refused_costs_only_its_chart(tmp_path: Path) -> None:
    with serving(CreateCustomChart="name is taken") as server:
        done = command(tmp_path, server.server_port)
    assert done.returncode == 0
    assert done.stdout.startswith("saved: ")
    assert "name is taken" in done.stdout
    assert "UpsertView2" in dict(server.asked)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "wandb_workspaces"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'collapsediag\[wandb\]'"):
        board.build_workspace("team", "proj")


# -- the regime map ----------------------------------------------------------------------------------------------------


def drawn_map(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The scene that Vega makes of the preset, with W&B's placeholders filled in."""
    vega = import_or_skip("vl_convert")
    text = json.dumps(board.regime_map())
    fields = {"${field:x}": "m/entropy", "${field:y}": "m/mi", "${field:step}": STEP, "${string:title}": "Map"}
    for placeholder, value in fields.items():
        assert placeholder in text
        text = text.replace(placeholder, value)
    assert "${" not in text
    spec = json.loads(text) | {"width": 400, "height": 300, "data": {"name": "wandb", "values": rows}}
    scene: dict[str, Any] = vega.vegalite_to_scenegraph(spec, vl_version="5.8")
    return scene


def marks(node: Any, kind: str) -> Iterator[dict[str, Any]]:
    if isinstance(node, list):
        for child in node:
            yield from marks(child, kind)
    elif isinstance(node, dict):
        if node.get("marktype") == kind:
            yield node
        for child in node.values():
            yield from marks(child, kind)


def test_the_map_draws_each_run_relative_to_its_own_start() -> None:
    mi = {"a": [2.0, 2.2, 1.8, 2.1, 1.9, 1.0, 0.0, 2.0], "b": [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 2.0, 1.0]}
    rows = [
        {"name": run, STEP: 10 * i, "m/mi": value, "m/entropy": 1.0 if i < 6 else 0.5}
        for run, values in mi.items()
        for i, value in enumerate(values)
    ]
    rows = [*rows[::-1], {"name": "a", STEP: 5, "m/mi": None, "m/entropy": None}]  # any order; a step without a score
    (points,) = (mark for mark in marks(drawn_map(rows), "symbol") if mark.get("role") == "mark")
    y = sorted({(round(item["y"], 3)) for item in points["items"]})
    assert len(points["items"]) == 16
    # Pixels are linear in the ratio: 0 (run a at step 60) is the lowest, 1.1 (at step 10) the highest.
    starts = {"a": 2.0, "b": 4.0}
    ratios = sorted({round(value / starts[run], 6) for run, values in mi.items() for value in values}, reverse=True)
    assert len(y) == len(ratios)
    for pixel, ratio in zip(y, ratios, strict=True):
        assert pixel == pytest.approx(y[-1] + (y[0] - y[-1]) * ratio / 1.1, abs=0.01)
    x = {round(item["x"], 3) for item in points["items"]}
    assert len(x) == 2
    assert min(x) == pytest.approx(max(x) / 2)


def test_the_maps_borders_are_those_of_the_findings() -> None:
    text = board.CHART_FILE.read_text(encoding="utf-8")
    settings = FindingSettings()
    datum = {key: value for pair in re.findall(r'"(x|y)": \{\s*"datum": ([\d.]+)', text) for key, value in [pair]}
    assert datum == {"x": str(settings.conditional_entropy_low), "y": str(settings.dependence_low)}
    assert set(re.findall(r"datum\.rank <= (\d+)", text)) == {str(settings.n_baseline)}
    told = (Path(__file__).parents[1] / "docs" / "adapters" / "wandb.md").read_text(encoding="utf-8")
    assert f"findings](../reading.md) use: {datum['x']} and {datum['y']}." in told
    regimes = {"diverse reasoning", "template collapse", "compressed reasoning", "low-entropy collapse"}
    assert set(re.findall(r'"text": "([^"]+)"', text)) == regimes
