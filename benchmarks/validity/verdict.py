"""What the answers say, in words. The numbers are filled in; the words are ours: read them again with new numbers."""

from __future__ import annotations

import textwrap

import numpy as np

from benchmarks.validity.answers import PREFIX
from benchmarks.validity.study import Study


def verdict(study: Study) -> str:
    """The summary at the top of the page."""
    return "\n".join(
        textwrap.fill(" ".join(point.split()), 118, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
        for point in (
            _seen(study),
            _across(study),
            _late(study),
            _unseen(study),
            _thresholds(study),
            _few(study),
            LIMITS,
        )
    )


LIMITS = """**What it cannot say.** One small policy, one task, collapses within a few updates, and MI at its
    bound as long as a run is healthy. Success and reading are lost together in most runs, so that the numbers
    that track one track both. The second half is no blind check: both halves were seen while the study was built.
    `squeezed` was added because the grid held no low-entropy collapse, `template` was lengthened from 30 steps
    because one run had hardly collapsed by then, and success came to excuse a fall of reward variance
    (`solved_high`) after a healthy run had raised that alarm."""


def _seen(study: Study) -> str:
    found, entropy = study.findings, study.entropy_alarm
    return f"""**Dependence is seen where entropy sees nothing.** Of {found.detected.n} runs that stopped reading
    their prompt while the format held, the dependence findings were up in {found.detected.k}, `entropy_collapse`
    in {entropy.detected.k}. In {found.false_runs.n} healthy runs ({found.false_steps.n} scored steps) they came
    up in {found.false_runs.k}; `entropy_collapse` in {entropy.false_runs.k}, which are punished for entropy."""


def _across(study: Study) -> str:
    rho = {
        name: study.correlations["success"].get((f"{PREFIX}{name}", "last"))
        for name in ("mi_zscore_ema", "mi_seq_estimate", "mi_zscore_marginal_ema", "conditional_entropy_est")
    }
    said = {name: "none" if row is None else f"{row.rho:+.2f}" for name, row in rho.items()}
    return f"""**Across runs, the z-score over the gap's spread goes with final success, and entropy against
    it.** Rank correlations of last values: {said["mi_zscore_ema"]} for `mi_zscore_ema`,
    {said["mi_seq_estimate"]} for `mi_seq_estimate`, {said["mi_zscore_marginal_ema"]} with the marginal's spread
    as scale (RAGEN's choice), {said["conditional_entropy_est"]} for H(Z|X). As an alarm of its own the z-score
    is poor: where MI is at its bound the gaps hardly spread, and it is huge and restless. The mean reward
    correlates best of all, in runs that are mostly paid for success; within the template scenario it stays where
    it was."""


def _late(study: Study) -> str:
    middle = np.median(study.findings.leads) if study.findings.leads else float("nan")
    return f"""**The alarm is no forecast here.** Most of these collapses take one or two scored steps, and five
    are needed before an alarm can be known: it came {-middle:.0f} training steps (the median) after half of the
    reading was gone. Where collapse may be quick, score more often."""


def _unseen(study: Study) -> str:
    lost = [one for one in study.outcomes if one.kind == "format loss"]
    found = sum(any("format_loss" in said for said in one.said) for one in lost)
    answers = sum(one.kind == "answer lost" for one in study.outcomes)
    bare = study.bare["entropy/token_mean"][1].second.detected
    return f"""**What it does not see.** A format lost within the first scored steps leaves nothing to score and
    becomes the baseline: {len(lost)} runs lost their format, `format_loss` was found in {found}. Answers that stop
    reading the prompt behind reasoning that still does ({answers} run) are no matter of dependence. Token entropy
    alone, at its best threshold, found {bare.k} of {bare.n}: those that ended in one trace for everything."""


def _thresholds(study: Study) -> str:
    scan = study.thresholds["dependence_low"]
    half, chosen = scan[0.5], scan[0.8]
    return f"""**Thresholds.** Half of the start, the first guess, found {half.first.detected.k} of
    {half.first.detected.n} and {half.second.detected.k} of {half.second.detected.n}; 0.8, the lowest that found
    most of the first half, finds {chosen.first.detected.k} and {chosen.second.detected.k}, with
    {chosen.first.false_runs.k} and {chosen.second.false_runs.k} false alarms. The other thresholds stayed."""


def _few(study: Study) -> str:
    whole, one, few = study.sizes[16, 4].detected, study.sizes[16, 1].detected, study.sizes[4, 4].detected
    return f"""**Prompts matter more than traces.** 16 prompts with 4 traces each found {whole.k} of {whole.n},
    with a single trace each {one.k}; 4 prompts with 4 traces each {few.k}."""
