"""All checks over a series of records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from collapsediag.findings import behaviour, dependence, learning_signal, lookalikes
from collapsediag.findings.facts import Facts
from collapsediag.findings.finding import Finding, Verdict
from collapsediag.findings.settings import FindingSettings
from collapsediag.record import Record

# Look-alikes first: a bug must be ruled out before a policy is blamed.
CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    lookalikes.chance_from_the_start,
    lookalikes.identical_completions,
    lookalikes.truncation,
    lookalikes.groups_out_of_order,
    lookalikes.healthy_saturation,
    dependence.template_collapse,
    dependence.low_entropy_collapse,
    dependence.compressed_reasoning,
    dependence.mi_saturation,
    behaviour.entropy_collapse,
    behaviour.tool_use_collapse,
    behaviour.format_loss,
    behaviour.length_collapse,
    learning_signal.reward_variance_cliff,
    learning_signal.all_equal_groups,
    learning_signal.pass_at_k_narrowing,
    learning_signal.environment_collapse,
)


def judge(records: Iterable[Record], *, settings: FindingSettings | None = None) -> Verdict:
    """What a run's records say about its health.

    records: as `read_records` or `Monitor.observe` gave them, in any order; of a step given twice the last one holds.
        A trainer's own log of scalars becomes records by `from_history`.
    settings: thresholds and persistence.

    Every check answers: ok, info, warning, critical, or skipped with what was missing. A state is named after
    `persistence` measured steps in a row and dates from the first of them. Training reward is never proof of health: no
    finding gets milder because it rises.

    >>> calls = [2.2, 2.1, 2.3, 2.2, 2.1, 0.2, 0.1, 0.0]
    >>> verdict = judge(Record(step=s, values={"tools/calls_per_rollout": c}) for s, c in enumerate(calls))
    >>> verdict.status, verdict["tool_use_collapse"].since_step
    ('critical', 5)
    """
    chosen = settings if settings is not None else FindingSettings()
    latest: dict[int, Record] = {}
    for record in records:
        latest[record.step] = record
    ordered = [latest[step] for step in sorted(latest)]
    facts = Facts(tuple(record for record in ordered if record.status == "ok"), chosen)
    scored = max(facts.regimes.values(), key=lambda steps: steps[-1].step, default=None)
    first = facts.regimes.get("first_turn") or scored
    n_scored = len(scored) if scored else 0
    return Verdict(
        findings=tuple(check(facts) for check in CHECKS),
        n_steps=len(ordered),
        n_scored=n_scored,
        n_failed=len(ordered) - len(facts.records),
        last_step=ordered[-1].step if ordered else None,
        last_scored_step=scored[-1].step if scored else None,
        regime=first[-1].name if first else None,
        not_known=dependence.not_known(ordered, n_scored, chosen.persistence),
    )
