"""Records as people read them in a terminal: one line per scored step, and a table of one record.

rich is imported where it is used, so that a training process that prints nothing does not load it.
"""

from __future__ import annotations

import re
from typing import IO, TYPE_CHECKING, Any

from collapsediag.metrics.registry import find
from collapsediag.plain_text import counted, number, printable
from collapsediag.record import Record
from collapsediag.turn_cuts import DRAWS

if TYPE_CHECKING:
    from rich.console import Console

BAR_CELLS = 20
WIDTH_WITH_UNITS = 100

Cells = tuple[str, str, str, str, str]  # of a row: metric, value, interval, what to read it against, unit

# What a metric is read against: its chance level or its bound, by the name it has in the same namespace.
REFERENCES = {
    "retrieval_accuracy": ("chance", "retrieval_chance_level"),
    "retrieval_accuracy@2": ("chance", "retrieval_chance_level@2"),
    "retrieval_accuracy@4": ("chance", "retrieval_chance_level@4"),
    "retrieval_accuracy@8": ("chance", "retrieval_chance_level@8"),
    "retrieval_accuracy_subset": ("chance", "retrieval_subset_chance_level"),
    "mi_seq_estimate": ("bound", "mi_upper_bound"),
    "reward/all_equal_fraction": ("chance", "reward/expected_all_equal_fraction"),
}
# In the order a person reads them; everything else stays in metrics.jsonl.
MATRIX_HEADLINES = (
    "retrieval_accuracy",
    "retrieval_accuracy@4",
    "retrieval_accuracy_subset",
    "mi_estimate",
    "mi_seq_estimate",
    "mi_zscore_ema",
    "conditional_entropy_est",
    "reasoning_entropy_est",
    "retrieval_p_value",
)
ROLLOUT_HEADLINES = (
    "format/valid_fraction",
    "length/mean",
    "length_words/mean",
    "length/truncated_fraction",
    "reward/mean",
    "reward/within_group_std",
    "reward/all_equal_fraction",
    "reward/variance_spread",
    "pass@1",
    "diversity/distinct_answers_per_group",
    "diversity/identical_completion_fraction",
    "tools/calls_per_rollout",
    "entropy/token_mean",
)


def plain_console(**options: Any) -> Console:
    """A console of rich's that raises BrokenPipeError once its reader has gone away (`| head`), and leaves no blanks at
    the ends of lines in what is no terminal.

    rich itself would then send this process' stdout to nowhere and end it: a training run is not its to end.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            if self.is_terminal or self.is_jupyter:
                super().print(*objects, **how)
                return
            with self.capture() as captured:
                super().print(*objects, **how)
            self.file.write(re.sub(" +\n", "\n", captured.get()))
            self.file.flush()

        def on_broken_pipe(self) -> None:
            raise  # what rich has caught

    return PlainConsole(highlight=False, **options)


def retrieval_bar(accuracy: float, chance: float, cells: int = BAR_CELLS) -> str:
    """A bar of `accuracy` with a mark where chance lies, so that "at chance" is seen and not computed.

    >>> retrieval_bar(0.5, 0.1, cells=10)
    '█│███·····'
    """
    filled = round(max(0.0, min(1.0, accuracy)) * cells)
    mark = min(cells - 1, round(chance * cells))
    return "".join("│" if i == mark else ("█" if i < filled else "·") for i in range(cells))


class ConsoleSink:
    """Prints one line per scored step; a failed step prints its reason.

    stream: where to; standard error when not given, so that piped output stays clean.
    namespace: which draw of turns the line shows.
    """

    HEADER = (
        f"{'step':>6}  {'retrieval (│ chance)':<{BAR_CELLS}} {'':>5}  {'MI':>6} {'of max':>6} "
        f"{'z':>6}  {'H(Z|X)':>7}  {'format':>6}  {'reward':>6}"
    )

    def __init__(
        self, stream: IO[str] | None = None, *, namespace: str = "first_turn", width: int | None = None
    ) -> None:
        self._console = plain_console(file=stream, stderr=stream is None, soft_wrap=True, width=width)
        self._namespace = namespace
        self._lines = 0

    def write(self, record: Record) -> None:
        """Print the record if its step was scored or failed."""
        if record.status == "failed":
            self._console.print(
                f"{record.step:>6}  failed: {printable(record.reason or '')}", style="red", markup=False
            )
            return
        prefix = f"collapse_{self._namespace}_sample/"
        values = {k[len(prefix) :]: v for k, v in record.values.items() if k.startswith(prefix)}
        if "retrieval_accuracy" in values:
            self._print_header()
            style = _retrieval_style(values)
            self._console.print(_line(record, values), style=style, markup=False)
        elif (reason := record.not_measured.get(prefix[:-1])) is not None:
            self._console.print(f"{record.step:>6}  not measured: {printable(reason)}", style="yellow", markup=False)

    def close(self) -> None:
        """Nothing to close: the stream belongs to the caller."""

    def _print_header(self) -> None:
        if self._lines % 25 == 0:
            self._console.print(self.HEADER, style="bold", markup=False)
        self._lines += 1


def _retrieval_style(values: dict[str, float]) -> str | None:
    low = values.get("retrieval_accuracy/ci_low", values["retrieval_accuracy"])
    if low <= values["retrieval_chance_level"]:
        return "red"  # the interval reaches chance: the reasoning may no longer depend on the prompt
    return "yellow" if values["retrieval_accuracy"] < 0.5 else "green"


def _line(record: Record, values: dict[str, float]) -> str:
    def cell(name: str, source: dict[str, float], width: int, digits: int = 2) -> str:
        # The sum turns a rounded -0.0 into 0.0.
        return f"{round(source[name], digits) + 0.0:>{width}.{digits}f}" if name in source else f"{'-':>{width}}"

    rollout = dict(record.values)
    return (
        f"{record.step:>6}  {retrieval_bar(values['retrieval_accuracy'], values['retrieval_chance_level'])} "
        f"{cell('retrieval_accuracy', values, 5)}  {cell('mi_estimate', values, 6, 3)} "
        f"{cell('mi_saturation', values, 6)} {cell('mi_zscore_ema', values, 6, 1)}  "
        f"{cell('conditional_entropy_est', values, 7, 3)}  {cell('format/valid_fraction', rollout, 6)}  "
        f"{cell('reward/mean', rollout, 6, 3)}"
    )


def summary_lines(record: Record, *, width: int = 100) -> list[str]:
    """The record's headline numbers as lines: value, 95% interval, what to read it against, unit.

    width: of the terminal. A narrow one goes without units, which the metrics page has.
    """
    rows: list[str | Cells] = [("metric", "value", "95% interval", "read against", "unit")]
    for namespace, words in DRAWS.items():
        prefix = f"collapse_{namespace}_sample/"
        rows += _section(record, prefix, MATRIX_HEADLINES, f"reasoning, {words}{_count(record, prefix)}")
    n, g = (record.values.get(name) for name in ("n_rollouts", "n_groups"))
    counts = f": {counted(n, 'rollout')} in {counted(g, 'group')}" if n is not None and g is not None else ""
    rows += _section(record, "", ROLLOUT_HEADLINES, f"all rollouts of the step{counts}")
    with_units = width >= WIDTH_WITH_UNITS
    value_width = max([9, *(len(row[1]) for row in rows if not isinstance(row, str))])
    interval_width = max([18, *(len(row[2]) for row in rows if not isinstance(row, str))])
    name_width = max(24, min(44, width - 18 - value_width - interval_width - (12 if with_units else 0)))
    widths = (name_width, value_width, interval_width)
    return [row if isinstance(row, str) else _row(row, widths, with_units) for row in rows]


def _count(record: Record, prefix: str) -> str:
    n, p = (record.values.get(prefix + name) for name in ("n_traces", "n_contexts"))
    return f": {n:.0f} traces under {p:.0f} prompts" if n is not None and p is not None else ""


def _section(record: Record, prefix: str, names: tuple[str, ...], heading: str) -> list[str | Cells]:
    present = [name for name in names if prefix + name in record.values]
    if not present:
        return []
    rows: list[str | Cells] = ["", heading]
    for name in present:
        key = prefix + name
        info = find(key)
        low, high = (record.values.get(f"{key}/{end}") for end in ("ci_low", "ci_high"))
        kind, reference = REFERENCES.get(name, ("", ""))
        against = record.values.get(prefix + reference)
        cells = (
            f"  {name}",
            number(record.values[key]),
            f"[{number(low, 3)}, {number(high, 3)}]" if low is not None and high is not None else "",
            f"{kind} {number(against, 3)}" if against is not None else "",
            info.unit if info else "",
        )
        rows.append(cells)
    return rows


def _row(cells: Cells, widths: tuple[int, int, int], with_units: bool) -> str:
    name, value, interval, against, unit = cells
    name_width, value_width, interval_width = widths
    if len(name) > name_width:
        name = name[: name_width - 1] + "…"
    line = f"{name:<{name_width}} {value:>{value_width}} {interval:>{interval_width}} {against:>14}"
    return f"{line}  {unit}".rstrip() if with_units else line.rstrip()
