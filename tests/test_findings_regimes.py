"""Regimes: relative to the run's own start and to chance, persistent, and never from one point."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

import collapsediag as cd
from collapsediag.errors import SettingsError
from collapsediag.findings.series import Series, baselines, high_episodes, low_episodes, series_of, sustained
from collapsediag.metrics.from_matrix import matrix_metrics
from collapsediag.record import Record
from collapsediag.testing import planted

PREFIX = "collapse_first_turn_sample/"


def scored(
    step: int,
    accuracy: float = 0.9,
    *,
    mi: float | None = None,
    entropy: float = 1.5,
    n_contexts: int = 8,
    half: float = 0.02,
    p_value: float | None = None,
    namespace: str = "first_turn",
) -> Record:
    """A handmade scored step; MI follows retrieval unless given."""
    chance, bound = 1 / n_contexts, math.log(n_contexts)
    share = (accuracy - chance) / (1 - chance)
    mi = bound * share if mi is None else mi
    values = {
        "retrieval_accuracy": accuracy,
        "retrieval_accuracy/ci_low": accuracy - half,
        "retrieval_accuracy/ci_high": accuracy + half,
        "retrieval_chance_level": chance,
        "retrieval_p_value": p_value if p_value is not None else (0.001 if share > 0.1 else 0.4),
        "mi_seq_estimate": mi,
        "mi_upper_bound": bound,
        "mi_saturation": mi / bound,
        "conditional_entropy_est": entropy,
        "n_contexts": float(n_contexts),
    }
    return Record(step=step, values={f"collapse_{namespace}_sample/{name}": value for name, value in values.items()})


def run_of(*accuracies: float, **fields: float) -> list[Record]:
    return [scored(10 * i, a, **fields) for i, a in enumerate(accuracies)]  # type: ignore[arg-type]


def names(records: list[Record], **options: object) -> list[str | None]:
    return [step.name for step in cd.regimes(records, **options)]  # type: ignore[arg-type]


@functools.cache
def planted_values(regime: str, seed: int, n_contexts: int = 8, group_size: int = 8) -> dict[str, float]:
    matrix = planted(regime, n_contexts=n_contexts, group_size=group_size, seed=seed).matrix  # type: ignore[arg-type]
    return {PREFIX + k: v for k, v in matrix_metrics(matrix, n_resamples=200, seed=seed).items()}


def planted_run(*regimes: str, seed: int = 0, n_contexts: int = 8) -> list[Record]:
    """One step of each regime; each step is another policy, which is rougher than any training run."""
    return [
        Record(step=10 * i, values=planted_values(regime, 100 * seed + i, n_contexts))
        for i, regime in enumerate(regimes)
    ]


@pytest.mark.parametrize(
    ("regime", "name"),
    [
        ("healthy", "diverse reasoning"),
        ("template", "template collapse"),
        ("compressed", "compressed reasoning"),
        ("low_entropy", "low-entropy collapse"),
    ],
)
def test_each_planted_regime_is_named_and_dated(regime: str, name: str) -> None:
    for seed in range(3):
        steps = cd.regimes(planted_run(*["healthy"] * 6, *[regime] * 3, seed=seed))
        assert [s.name for s in steps[:8]] == [None, None, *["diverse reasoning"] * 6], seed
        assert (steps[8].name, steps[8].since_step) == (name, 0 if regime == "healthy" else 60), seed


@pytest.mark.parametrize("n_contexts", [3, 5, 7, 8, 12])
def test_total_collapse_is_at_chance_whatever_the_rounding_of_its_interval(n_contexts: int) -> None:
    """Every row is one tie, so the interval has no width and chance is 1/P up to a rounding of either."""
    steps = cd.regimes(planted_run(*["template"] * 3, seed=3, n_contexts=n_contexts))
    assert [step.at_chance for step in steps] == [True] * 3
    nudged = scored(0, 1 / n_contexts + 4e-17, half=0.0, n_contexts=n_contexts, p_value=0.01)
    above = dataclasses.replace(
        nudged, values={**nudged.values, PREFIX + "retrieval_accuracy/ci_low": 1 / n_contexts + 3e-17}
    )
    assert cd.regimes([above])[0].at_chance


def test_the_interval_that_reaches_chance_is_low_whatever_the_baseline() -> None:
    # 0.24 at chance 0.125 is 0.92 of the baseline 0.25, but cannot be told from chance.
    healthy, noisy = [0.25] * 6, [scored(10 * i, 0.24, half=0.12, p_value=0.01) for i in range(6, 9)]
    assert names([*run_of(*healthy), *noisy])[-1] == "template collapse"
    sure = [scored(10 * i, 0.24, half=0.01, p_value=0.01) for i in range(6, 9)]
    assert names([*run_of(*healthy), *sure])[-1] == "diverse reasoning"


def test_a_large_p_value_is_chance_except_where_none_can_be_small() -> None:
    def last(n_contexts: int) -> bool:
        return cd.regimes([scored(0, 0.9, n_contexts=n_contexts, p_value=0.17)])[0].at_chance

    # 1/P! is the smallest p-value: 1/6 for 3 contexts.
    assert (last(3), last(4)) == (False, True)
    assert not cd.regimes([scored(0, 0.9, p_value=0.05)])[0].at_chance


def test_low_is_both_mi_and_retrieval_below_four_fifths_of_the_baseline() -> None:
    start = run_of(*[0.9] * 6)
    share = (0.9 - 0.125) / 0.875  # 0.886 above chance, of what is possible

    def later(ratio: float, mi_ratio: float) -> str | None:
        accuracy = 0.125 + 0.875 * share * ratio
        mi = math.log(8) * share * mi_ratio
        return names([*start, *(scored(10 * i, accuracy, mi=mi) for i in range(6, 9))])[-1]

    assert later(0.79, 0.79) == "template collapse"
    assert later(0.81, 0.79) == "diverse reasoning"
    assert later(0.79, 0.81) == "diverse reasoning"


def test_low_is_no_dependence_whose_interval_still_reaches_the_baseline() -> None:
    """The same fall from 0.9 to 0.5 of few traces, and of many; the share of what is possible counts, at any P."""
    for n_contexts in (8, 4):
        chance = 1 / n_contexts
        same = chance + (0.9 - 0.125) / 0.875 * (1 - chance)  # as far above chance as 0.9 of 8
        for half, name in ((same - 0.5 + 0.01, "diverse reasoning"), (same - 0.5 - 0.01, "template collapse")):
            few = [scored(10 * i, 0.5, mi=0.5, half=half, n_contexts=n_contexts, p_value=0.001) for i in range(6, 9)]
            lifted = [
                dataclasses.replace(r, values={**r.values, PREFIX + "retrieval_accuracy/ci_low": 0.45}) for r in few
            ]
            assert names([*run_of(*[0.9] * 6), *lifted])[-1] == name


def test_h_below_seven_tenths_of_the_baseline_is_low() -> None:
    start = run_of(*[0.9] * 6)
    assert names([*start, *(scored(10 * i, entropy=1.5 * 0.69) for i in range(6, 9))])[-1] == "compressed reasoning"
    assert names([*start, *(scored(10 * i, entropy=1.5 * 0.71) for i in range(6, 9))])[-1] == "diverse reasoning"


def test_h_is_not_low_while_its_interval_reaches_the_baseline() -> None:
    unsure = scored(0, entropy=0.9)
    key = PREFIX + "conditional_entropy_est"
    later = [
        dataclasses.replace(unsure, step=10 * i, values={**unsure.values, f"{key}/ci_low": 0.2, f"{key}/ci_high": high})
        for high in (1.6, 1.4)
        for i in range(6, 9)
    ]
    assert names([*run_of(*[0.9] * 6), *later[:3]])[-1] == "diverse reasoning"
    assert names([*run_of(*[0.9] * 6), *later[3:]])[-1] == "compressed reasoning"


def test_one_or_two_bad_steps_are_never_named() -> None:
    assert set(names(run_of(*[0.9] * 6, 0.125, 0.125, *[0.9] * 3))) == {None, "diverse reasoning"}
    assert set(names(run_of(0.125, 0.125))) == {None}
    assert set(names(run_of(*[0.9] * 6, 0.125, 0.9, 0.125, 0.9, 0.125, 0.9))) == {None, "diverse reasoning"}


def test_a_state_is_left_only_above_its_border_and_for_good() -> None:
    share = (0.9 - 0.125) / 0.875

    def at(ratio: float) -> float:
        return 0.125 + 0.875 * share * ratio

    collapsed = [*[0.9] * 6, *[at(0.4)] * 3]
    # Between 0.8 and 0.84 of the baseline nothing changes: that is the hysteresis.
    assert names(run_of(*collapsed, *[at(0.83)] * 6))[-1] == "template collapse"
    assert names(run_of(*collapsed, *[at(0.85)] * 6))[-1] == "diverse reasoning"
    assert names(run_of(*collapsed, at(0.9), at(0.9)))[-1] == "template collapse"
    back = cd.regimes(run_of(*collapsed, *[at(0.9)] * 3))
    assert (back[-1].name, back[-1].since_step) == ("diverse reasoning", 110)
    # And from above, 0.83 is no collapse.
    assert names(run_of(*[0.9] * 6, *[at(0.83)] * 6))[-1] == "diverse reasoning"


def test_fewer_or_more_prompts_change_chance_and_bound_but_no_regime() -> None:
    """The same perfect dependence at another P; MI falls from log 32 to log 4, accuracy and chance move."""
    many = [scored(10 * i, 0.98, mi=0.98 * math.log(32), n_contexts=32) for i in range(6)]
    few = [scored(10 * i, 0.98, mi=0.98 * math.log(4), n_contexts=4) for i in range(6, 12)]
    assert set(names([*many, *few])) == {None, "diverse reasoning"}
    assert set(names([dataclasses.replace(r, step=300 - r.step) for r in reversed([*many, *few])])) == {
        None,
        "diverse reasoning",
    }
    ratios = [step.mi_ratio for step in cd.regimes([*many, *few])][6:]
    np.testing.assert_allclose(ratios, 0.98, atol=1e-12)  # both cut at log 4: 0.98 log 4 of log 4


def test_retrieval_is_compared_as_a_share_of_what_is_possible() -> None:
    # 0.9 of 2 prompts is 0.4 above chance, and 32 prompts had 0.95; but it is 0.8 of all that 2 prompts allow.
    many = [scored(10 * i, 0.98, n_contexts=32) for i in range(6)]
    few = [scored(10 * i, 0.9, mi=0.3, n_contexts=2) for i in range(6, 10)]
    steps = cd.regimes([*many, *few])
    assert steps[-1].name == "diverse reasoning"
    assert steps[-1].retrieval_ratio == pytest.approx(0.8 / ((0.98 - 1 / 32) / (31 / 32)))


def test_weak_dependence_is_not_low_only_because_the_bound_grew() -> None:
    # 0.2 nats are 29% of log 2 and 5% of log 64: as a share of the bound this would look like a collapse.
    few = [scored(10 * i, 0.65, mi=0.2, n_contexts=2, half=0.05) for i in range(6)]
    many = [scored(10 * i, 0.13, mi=0.2, n_contexts=64, half=0.02) for i in range(6, 10)]
    assert set(names([*few, *many])) == {None, "diverse reasoning"}


@pytest.mark.parametrize("sizes", [(8, 4), (8, 16), (16, 4)])
def test_planted_policies_keep_their_regime_when_the_number_of_prompts_changes(sizes: tuple[int, int]) -> None:
    for later, name in (("healthy", "diverse reasoning"), ("template", "template collapse")):
        records = [
            *(Record(step=i, values=planted_values("healthy", i, sizes[0])) for i in range(6)),
            *(Record(step=i, values=planted_values(later, i, sizes[1])) for i in range(6, 9)),
        ]
        assert names(records)[-1] == name


def random_run(seed: int) -> list[Record]:
    rng = np.random.default_rng(seed)
    level = np.cumsum(rng.normal(0, 0.25, 24)) + 0.6
    accuracy = 0.125 + 0.875 * np.clip(level, 0, 1)
    entropy = np.clip(1.5 + np.cumsum(rng.normal(0, 0.2, 24)), 0.05, None)
    return [scored(5 * i, float(a), entropy=float(h)) for i, (a, h) in enumerate(zip(accuracy, entropy, strict=True))]


def test_what_was_said_of_a_step_is_never_unsaid_by_later_ones() -> None:
    seen = set()
    for seed in range(25):
        records = random_run(seed)
        whole = cd.regimes(records)
        seen |= {step.name for step in whole}
        for n in (1, 3, 5, 8, 15):
            assert cd.regimes(records[:n]) == whole[:n]
    assert len(seen) == 5  # all four, and none


def test_regimes_do_not_depend_on_the_unit_of_entropy_or_on_step_numbers() -> None:
    for seed in range(10):
        records = random_run(seed)
        key = PREFIX + "conditional_entropy_est"
        scaled = [
            dataclasses.replace(r, step=r.step * 7 + 3, values={**r.values, key: r.values[key] / math.log(2)})
            for r in records
        ]
        assert names(scaled) == names(records)


def test_each_draw_of_turns_has_its_own_regime_and_budgets_have_theirs() -> None:
    turns = [scored(i, 0.9 if i < 6 else 0.125, namespace="turn") for i in range(9)]
    assert names(turns) == []
    assert names(turns, namespace="turn")[-1] == "template collapse"
    renamed = {
        "retrieval_accuracy": "retrieval_accuracy_subset",
        "retrieval_chance_level": "retrieval_subset_chance_level",
    }
    budget = []
    for record in run_of(*[0.9] * 6, *[0.125] * 3):
        values = {}
        for key, value in record.values.items():
            name, slash, end = key.removeprefix(PREFIX).partition("/")
            values[f"{PREFIX}{renamed.get(name, name)}{slash}{end}"] = value
        budget.append(dataclasses.replace(record, values=values))
    assert names(budget)[-1] == "template collapse"


def test_steps_that_failed_or_were_not_scored_say_nothing() -> None:
    records = run_of(*[0.9] * 6, *[0.125] * 3)
    between = [Record(step=r.step + 1, values={"reward/mean": 1.0}) for r in records]
    failed = [Record(step=r.step + 2, values={}, status="failed", reason="out of memory") for r in records]
    mixed = sorted([*records, *between, *failed], key=lambda r: r.step)
    assert cd.regimes(mixed) == cd.regimes(records)


def test_low_entropy_collapse_dates_from_the_state_that_completed_it() -> None:
    first_h = [*run_of(*[0.9] * 6), *(scored(60 + 10 * i, 0.9, entropy=0.5) for i in range(4))]
    both = [*first_h, *(scored(100 + 10 * i, 0.125, entropy=0.5) for i in range(3))]
    steps = cd.regimes(both)
    assert (steps[9].name, steps[9].since_step) == ("compressed reasoning", 60)
    assert (steps[-1].name, steps[-1].since_step) == ("low-entropy collapse", 100)
    loud = [*both, *(scored(130 + 10 * i, 0.125, entropy=1.5) for i in range(3))]
    last = cd.regimes(loud)[-1]
    # A state that was left gives no date of its own: the new name dates from the step at which it is known.
    assert (last.name, last.since_step) == ("template collapse", 150)


def test_baselines_are_the_first_steps_and_keep_the_last_three_out() -> None:
    values = [float(i) for i in range(10)]
    found = baselines(values, cd.FindingSettings())
    assert found == [None, None, 0.5, 0.5, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_sustained_against_a_plain_automaton() -> None:
    """Independent: look back at the last three steps instead of counting."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        codes = rng.integers(0, 3, 40).tolist()  # 0 clear, 1 neither, 2 bad
        since, expected, changed_at = None, [], -1
        for i in range(len(codes)):
            window = codes[max(changed_at + 1, i - 2) : i + 1]
            if since is None and window == [2, 2, 2]:
                since, changed_at = i - 2, i
            elif since is not None and window == [0, 0, 0]:
                since, changed_at = None, i
            expected.append(since)
        assert sustained([c == 2 for c in codes], [c == 0 for c in codes], 3) == expected


def states(values: list[float], *, high: bool = False) -> list[int | None]:
    steps = tuple(range(len(values)))
    series = Series("x", steps, tuple(values), (None,) * len(values))
    settings = cd.FindingSettings()
    episodes = high_episodes(series, 0.5, settings) if high else low_episodes(series, 0.5, settings)
    return list(episodes.since_S)


def test_numbers_have_hysteresis_on_both_sides() -> None:
    start = [1.0] * 6
    assert states([*start, *[0.4] * 3, *[0.55] * 6])[-1] == 6
    assert states([*start, *[0.4] * 3, *[0.61] * 3])[-1] is None
    assert states([*start, *[0.55] * 6])[-1] is None
    assert states([0.1] * 3 + [0.5] * 3 + [0.45] * 6, high=True)[-1] == 3
    assert states([0.1] * 3 + [0.5] * 3 + [0.41] * 3, high=True)[-1] is None
    assert states([0.1] * 3 + [0.45] * 6, high=True)[-1] is None


def test_a_series_is_taken_from_the_first_name_that_is_held() -> None:
    records = [Record(step=0, values={"b": 1.0}), Record(step=1, values={"a": 2.0, "a/ci_low": 1.0, "a/ci_high": 3.0})]
    series = series_of(records, "a", "b")
    assert (series.name, series.steps, series.intervals) == ("a", (1,), ((1.0, 3.0),))
    assert len(series_of(records, "c")) == 0


@pytest.mark.parametrize(
    "wrong", [{"persistence": 0}, {"persistence": 1.5}, {"min_baseline": 6}, {"release": 0.9}, {"alpha": math.nan}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        cd.FindingSettings(**wrong)  # type: ignore[arg-type]


def test_settings_are_obeyed() -> None:
    records = run_of(*[0.9] * 6, 0.125, 0.125)
    assert names(records)[-1] == "diverse reasoning"
    assert names(records, settings=cd.FindingSettings(persistence=2))[-1] == "template collapse"
