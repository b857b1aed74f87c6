"""A saved W&B workspace of the charts that belong together, built from the metric registry.

Building needs no network; saving needs a login and a project. What a run logs is WandbSink's business; this only says
where on the page it is drawn.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collapsediag._optional import require
from collapsediag.chart_layout import Category, Chart, layout
from collapsediag.errors import TrackerError
from collapsediag.metrics.registry import find, registered
from collapsediag.tracker_values import tracker_name
from collapsediag.turn_cuts import DRAWS

NAME = "Collapse diagnostics"
# The x-axis that WandbSink gives every number.
STEP = "collapse/step"
MAP_TITLE = "Path on the regime map"
# Versioned: a preset on the server is never replaced by one that means something else.
CHART_NAME = "collapsediag_regime_map_v1"
CHART_FILE = Path(__file__).with_name("wandb_regime_map.vega.json")
TIMEOUT_S = 10
_FEATURE = "the W&B workspace"


def build_workspace(entity: str, project: str) -> Any:
    """The workspace as wandb-workspaces holds it; nothing is sent.

    A section for each draw of turns, one for the regime map and the matrix, and those of the rollouts, in the order of
    `chart_layout`. Raises MissingExtraError without wandb-workspaces.
    """
    workspaces = require("wandb_workspaces.workspaces", extra="wandb", feature=_FEATURE)
    first, *others = layout(_every_name())
    # Single-turn runs log the first draw alone, so the other two begin closed.
    is_draw = {f"Input dependence, {words}" for words in DRAWS.values()}
    sections = [_section(first, is_open=True), _map_section(entity)]
    sections += [_section(category, is_open=category.title not in is_draw) for category in others]
    sections.append(_traces_section())
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=STEP, smoothing_type="none"),
    )


def workspace_spec(workspace: Any) -> dict[str, Any]:
    """The view as it is sent to W&B, as plain data."""
    text = workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    return dict(json.loads(text))


def regime_map() -> dict[str, Any]:
    """The Vega-Lite preset of the regime map, with W&B's placeholders for fields and title."""
    return dict(json.loads(CHART_FILE.read_text(encoding="utf-8")))


def save_workspace(workspace: Any) -> tuple[str, str | None]:
    """Save the workspace and the preset of its regime map.

    Gives the address of the workspace, and why the preset was refused (None if it was not): the workspace is saved all
    the same. Raises TrackerError where W&B is not reached, knows no login, or has no such project.
    """
    wandb = require("wandb", extra="wandb", feature=_FEATURE)
    api = _open_api(wandb)
    path = f"{workspace.entity}/{workspace.project}"
    try:
        api.project(workspace.project, entity=workspace.entity).id  # noqa: B018  asks the server
    except ValueError as error:
        raise TrackerError(
            f"W&B has no project {path!r}, or this login may not see it. Log a run to it first, or check the spelling."
        ) from error
    refused = _register_map(api, workspace.entity)
    try:
        workspace.save()
    except Exception as error:  # wandb raises errors of several families, some of them private
        raise TrackerError(f"W&B did not save the workspace in {path!r}: {error}") from error
    return str(workspace.url), refused


def _open_api(wandb: Any) -> Any:
    base = str(wandb.setup().settings.base_url)
    try:
        # Asked first: without a network, W&B's client tries for minutes and then blames the login.
        urllib.request.urlopen(base, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # it answered
    except (OSError, ValueError) as error:
        raise TrackerError(
            f"W&B is not reached at {base}: {getattr(error, 'reason', error)}. Check the network and WANDB_BASE_URL; "
            "--dry-run needs neither."
        ) from error
    try:
        return wandb.Api(timeout=TIMEOUT_S)
    except wandb.Error as error:
        raise TrackerError(
            f"W&B knows no login for {base}: {error}\n  wandb login\nor set WANDB_API_KEY. --dry-run needs no login."
        ) from error


def _register_map(api: Any, entity: str) -> str | None:
    try:
        api.create_custom_chart(
            entity=entity,
            name=CHART_NAME,
            display_name=MAP_TITLE,
            spec_type="vega2",
            access="private",
            spec=regime_map(),
        )
    except Exception as error:  # a preset that is there already is refused too, and W&B has no name for that
        return str(error)
    return None


def _every_name() -> set[str]:
    """All that a run can log, under tracker names."""
    names = [name for name in registered() if "@k" not in name]
    scoped = [f"collapse_{namespace}_sample/{name}" for namespace in DRAWS for name in names]
    known = {tracker_name(name) for name in (*names, *scoped)}
    return known | {f"{name}/{end}" for name in known for end in ("ci_low", "ci_high")}


def _section(category: Category, *, is_open: bool) -> Any:
    workspaces = require("wandb_workspaces.workspaces", extra="wandb", feature=_FEATURE)
    panels = [_line_plot(chart) for chart in category.charts]
    return workspaces.Section(name=category.title, panels=panels, is_open=is_open)


def _line_plot(chart: Chart) -> Any:
    reports = require("wandb_workspaces.reports.v2", extra="wandb", feature=_FEATURE)
    info = find(chart.names[0])
    is_share = info is not None and info.bounds == (0.0, 1.0)
    return reports.LinePlot(
        title=chart.heading(),
        x=STEP,  # a panel's own default would win over the workspace's x-axis
        y=list(_lines(chart)),
        range_y=(0, 1) if is_share else (None, None),
        smoothing_type="none",
    )


def _lines(chart: Chart) -> Iterator[str]:
    yield from chart.names
    if chart.has_band:
        yield from (f"{chart.names[0]}/{end}" for end in ("ci_low", "ci_high"))


def _map_section(entity: str) -> Any:
    workspaces = require("wandb_workspaces.workspaces", extra="wandb", feature=_FEATURE)
    reports = require("wandb_workspaces.reports.v2", extra="wandb", feature=_FEATURE)
    prefix = "collapse_first_turn_sample/"
    entropy, mi = prefix + "conditional_entropy_est", prefix + "mi_seq_estimate"
    path = reports.CustomChart(
        query={"history": {"keys": [STEP, entropy, mi]}},
        chart_name=f"{entity}/{CHART_NAME}",
        chart_fields={"x": entropy, "y": mi, "step": STEP},
        chart_strings={"title": MAP_TITLE},
    )
    last = reports.ScatterPlot(
        title="H(Z|X) and I(X; Z) at the last scored step",
        x=reports.SummaryMetric(entropy),
        y=reports.SummaryMetric(mi),
    )
    images = [f"collapse_{namespace}_sample/matrix" for namespace in DRAWS]
    matrix = reports.MediaBrowser(title="Matrix: pointwise mutual information", media_keys=images)
    return workspaces.Section(name="Regime map and matrix", panels=[path, last, matrix], is_open=True)


def _traces_section() -> Any:
    workspaces = require("wandb_workspaces.workspaces", extra="wandb", feature=_FEATURE)
    reports = require("wandb_workspaces.reports.v2", extra="wandb", feature=_FEATURE)
    tables = [reports.WeavePanelSummaryTable(table_name=f"collapse_{namespace}_sample/traces") for namespace in DRAWS]
    return workspaces.Section(name="Traces (logged with traces=True)", panels=tables)
