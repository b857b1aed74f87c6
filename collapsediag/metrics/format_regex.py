r"""Outputs that must match a regular expression, without giving model text the power to hang the trainer.

Python's `re` backtracks: a pattern as innocent as `<think>.*?</think>\s*<answer>.*?</answer>` takes hours on a
megabyte of `</think><answer>`. No thread can stop it and a signal handler is not ours to set in somebody's trainer.
So the pattern runs in a small child process with its own clock: CPU seconds, so that a busy machine does not change a
verdict. An output that uses up its share counts as `regex_timeout`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from collapsediag.errors import MetricError, SettingsError
from collapsediag.metrics.format import strip_end_of_turn

DEFAULT_SECONDS = 0.25
# All timeouts of one batch together: after that the metric is not measured rather than the step held up.
BUDGET_SECONDS = 10.0

# The resource limit is the kernel's: a child whose parent was killed ends by it even inside the regex engine.
_CHILD = """
import json, re, signal, sys
try:
    import resource
except ImportError:
    resource = None
job = json.load(sys.stdin)
pattern = re.compile(job["pattern"], job["flags"])
match = getattr(pattern, job["method"])
timed = hasattr(signal, "setitimer")
def stop(*_):
    raise TimeoutError
if resource:
    resource.setrlimit(resource.RLIMIT_CPU, (job["budget"], job["budget"] + 1))
if timed:
    signal.signal(signal.SIGVTALRM, stop)
verdicts = []
for text in job["texts"]:
    verdict = "t"
    try:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, job["seconds"])
        verdict = "m" if match(text) else "n"
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TimeoutError:
        pass
    verdicts.append(verdict)
sys.stdout.write("".join(verdicts))
"""
_VERDICTS: dict[str, str | None] = {"m": None, "n": "no_match", "t": "regex_timeout"}


class RegexBudgetError(MetricError):
    """A pattern used up the CPU time of a whole batch, so its verdicts are not known."""


@dataclass(frozen=True)
class RegexFormat:
    r"""Outputs that a regular expression matches.

    pattern: text or a compiled pattern. `.` does not match a line break unless the flags say so.
    search: look for it anywhere; by default the whole output must match (end-of-turn tokens at the end left out).
    seconds: CPU time for one output; more counts as `regex_timeout`. Where the system has no such clock (Windows) the
        whole batch has BUDGET_SECONDS and then counts as not measured.

    Raises SettingsError for a pattern that does not compile, RegexBudgetError where the budget of the batch is used up.

    >>> RegexFormat(r"<answer>\d+</answer>").failures(["<answer>4</answer>", "4"], [None, None])
    [None, 'no_match']
    """

    pattern: str | re.Pattern[str]
    search: bool = False
    seconds: float = DEFAULT_SECONDS

    failure_names = ("no_match", "regex_timeout")

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern)
        except (re.error, TypeError, RecursionError) as error:
            raise SettingsError(f"{self.pattern!r} is not a regular expression for text: {error}.") from error
        if not isinstance(compiled.pattern, str):
            raise SettingsError(f"{self.pattern!r} is a pattern for bytes; outputs are text.")
        if not 0 < self.seconds <= BUDGET_SECONDS:
            raise SettingsError(f"seconds is {self.seconds}; it must lie between 0 and {BUDGET_SECONDS:g}.")

    def failures(self, outputs: Sequence[str], contexts: Sequence[str | None]) -> list[str | None]:
        """The failure of each output, None for a valid one."""
        if not outputs:
            return []
        compiled = re.compile(self.pattern)
        job = {
            "pattern": compiled.pattern,
            "flags": compiled.flags & ~re.DEBUG,
            "method": "search" if self.search else "fullmatch",
            "texts": [strip_end_of_turn(output) for output in outputs],
            "seconds": self.seconds,
            "budget": int(BUDGET_SECONDS),
        }
        verdicts = self._run(json.dumps(job))
        return [_VERDICTS[verdict] for verdict in verdicts]

    def _run(self, job: str) -> str:
        try:
            child = subprocess.run(
                [sys.executable or "python3", "-I", "-S", "-c", _CHILD],
                input=job,
                capture_output=True,
                encoding="ascii",
                errors="replace",
                # Wall time only as a last resort: on a busy machine the child may wait long for its CPU seconds.
                timeout=6 * BUDGET_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RegexBudgetError(self._too_slow()) from error
        except OSError as error:
            raise MetricError(
                f"RegexFormat runs the pattern in a child of {sys.executable!r}, which could not be started: {error}. "
                "Use TagFormat, or a callable."
            ) from error
        if child.returncode < 0:
            raise RegexBudgetError(self._too_slow())
        if child.returncode != 0:
            raise MetricError(f"the child that runs the regular expression failed: {child.stderr.strip()[-300:]}")
        return child.stdout

    def _too_slow(self) -> str:
        return (
            f"the regular expression {self.pattern!r:.100} used more than {BUDGET_SECONDS:g} CPU seconds on this "
            "batch. It backtracks: use TagFormat, or replace .* by a class that excludes the next delimiter."
        )
