"""Records in, judgement out: the regimes of a run, and findings that say what is wrong, since when, and what to read.

`judge` is the door; thresholds are in `FindingSettings`.
"""

from __future__ import annotations

from collapsediag.findings.checks import judge
from collapsediag.findings.finding import Finding, Verdict
from collapsediag.findings.history import from_history
from collapsediag.findings.regime import RegimeStep, regimes
from collapsediag.findings.settings import FindingSettings
from collapsediag.findings.words import verdict_lines

__all__ = [
    "Finding",
    "FindingSettings",
    "RegimeStep",
    "Verdict",
    "from_history",
    "judge",
    "regimes",
    "verdict_lines",
]
