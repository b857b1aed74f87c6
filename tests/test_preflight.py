"""Preflight: a sound batch passes, and each way of spoiling it is told by its own check."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from collapsediag.errors import MetricError, RolloutError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.format import TagFormat
from collapsediag.metrics.tool_parsers import make_call
from collapsediag.preflight import SEVERITY, Check, PreflightReport, preflight
from collapsediag.preflight.types import percent
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
from collapsediag.testing import planted

DATA = Path(__file__).parent / "data" / "rollouts"
P, G = 10, 8


def output(p: int, g: int) -> str:
    steps = " ".join(f"step{(7 * p + 3 * g + i) % 97}" for i in range(20))
    return f"<think>prompt {p} try {g} {steps}</think><answer>{(p * g) % 5}</answer>"


def sound_rollouts() -> list[Rollout]:
    """10 prompts of differing difficulty x 8 rollouts, in the default format, all finished."""
    return [
        Rollout(
            turns=(Turn(context=f"question {p}", output=output(p, g), finish_reason="stop"),),
            group=f"q{p}",
            reward=float(g <= (p * 5) % 8),
            success=g <= (p * 5) % 8,
        )
        for p in range(P)
        for g in range(G)
    ]


def change(rollouts: list[Rollout], edit: Callable[[int, Rollout], Rollout]) -> list[Rollout]:
    return [edit(i, rollout) for i, rollout in enumerate(rollouts)]


def with_turn(rollout: Rollout, **fields: object) -> Rollout:
    return replace(rollout, turns=(replace(rollout.turns[0], **fields),))  # type: ignore[arg-type]


def check_of(rollouts: list[Rollout], name: str, **settings: object) -> Check:
    return named(report_of(rollouts, **settings), name)


def report_of(rollouts: list[Rollout], **settings: object) -> PreflightReport:
    return preflight(RolloutBatch(step=0, rollouts=tuple(rollouts)), **settings)  # type: ignore[arg-type]


def named(report: PreflightReport, name: str) -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


# --- a sound batch -------------------------------------------------------------------------------------------------


def test_a_sound_batch_passes_every_check() -> None:
    report = report_of(sound_rollouts())
    assert {check.name: check.status for check in report.checks} == {
        "group size": "ok",
        "group order": "ok",
        "prompts within a group": "ok",
        "identical completions": "ok",
        "truncation": "ok",
        "format": "ok",
        "rewards": "ok",
        "prompts without signal": "ok",
        "spread of reward variance": "info",
        "pass@k": "ok",
        "tool calls": "skipped",
        "retrieval": "skipped",
    }
    assert report.status == "info"
    assert (report.n_rollouts, report.n_groups, report.n_ran, report.n_skipped) == (80, 10, 10, 2)
    assert not report.reaches("warning")
    assert report.reaches("info")
    assert report.headline == (
        "no warning; worth knowing: spread of reward variance. 10 checks ran, 2 skipped (tool calls, retrieval)."
    )


def test_every_check_reads_as_a_sentence_and_says_what_to_do() -> None:
    for report in (report_of(sound_rollouts()), report_of(sound_rollouts()[:3])):
        for check in report.checks:
            assert check.reading.endswith(".")
            assert check.status in SEVERITY or check.status == "skipped"
            if check.status in ("warning", "critical"):
                assert check.action.endswith(".")


# --- each way of spoiling it -----------------------------------------------------------------------------------------


def test_single_rollouts() -> None:
    check = check_of(sound_rollouts()[::G], "group size")
    assert (check.status, check.value) == ("warning", 1.0)
    assert "single rollout" in check.reading


@pytest.mark.parametrize(("n", "words"), [(G, f"with {G} rollouts"), (1, "with 1 rollout:")])
def test_one_prompt_in_the_step_cannot_be_scored_crosswise(n: int, words: str) -> None:
    check = check_of(sound_rollouts()[:n], "group size")
    assert check.status == "warning"
    assert f"the step has one prompt, {words}" in check.reading
    assert "at least 2 prompts in a step" in check.action


def test_unequal_groups_name_the_odd_ones() -> None:
    rollouts = sound_rollouts()
    del rollouts[9], rollouts[3]
    check = check_of(rollouts, "group size")
    assert check.status == "warning"
    assert "2 prompts do not have the usual 8" in check.reading
    assert check.rows == (0, 7)


@pytest.mark.parametrize(("n", "word"), [(3 * G, "few prompts"), (None, "few rollouts")])
def test_small_batches_are_told_apart(n: int | None, word: str) -> None:
    rollouts = sound_rollouts()
    few = rollouts[:n] if n else [r for i, r in enumerate(rollouts) if i % G < 2]
    check = check_of(few, "group size")
    assert check.status == "info"
    assert word in check.reading


def test_groups_that_are_not_adjacent() -> None:
    rollouts = sound_rollouts()
    rollouts[3], rollouts[9] = rollouts[9], rollouts[3]
    check = check_of(rollouts, "group order")
    assert (check.status, check.value, check.rows) == ("info", 0.8, (0, 3))


def test_two_environments_may_number_their_prompts_alike() -> None:
    rollouts = sound_rollouts()
    both = [replace(r, environment=e) for e in ("maze", "cube") for r in rollouts]
    both = change(both, lambda i, r: with_turn(r, context=f"{r.environment} {r.turns[0].context}"))
    report = report_of(both)
    assert report.n_groups == 2 * P
    assert named(report, "prompts within a group").status == "ok"


@pytest.mark.parametrize("form", ["context", "context_ids", "context_messages"])
def test_groups_assembled_out_of_order_are_critical(form: str) -> None:
    """Prompts and groups shifted by one row: most groups then hold two prompts."""
    rollouts = sound_rollouts()

    def shifted(i: int, rollout: Rollout) -> Rollout:
        p = ((i + 1) // G) % P
        value = {
            "context": f"question {p}",
            "context_ids": [5, p],
            "context_messages": ({"role": "user", "content": f"question {p}"},),
        }[form]
        return with_turn(rollout, **{"context": None, form: value})

    check = check_of(change(rollouts, shifted), "prompts within a group")
    assert (check.status, check.value) == ("critical", 1.0)
    assert len(check.rows) > 0
    unknown = change(rollouts, lambda i, r: with_turn(r, context=None))
    assert check_of(unknown, "prompts within a group").status == "skipped"
    assert check_of(rollouts[::G], "prompts within a group").status == "skipped"


def test_a_prompt_sampled_as_two_groups_is_worth_a_line() -> None:
    rollouts = change(sound_rollouts(), lambda i, r: with_turn(r, context=f"question {i // G // 2}"))
    check = check_of(rollouts, "prompts within a group")
    assert check.status == "info"
    assert "10 groups have 5 distinct prompts" in check.reading


@pytest.mark.parametrize(("copies", "status"), [(1, "ok"), (2, "critical"), (8, "critical")])
def test_samples_that_share_a_seed(copies: int, status: str) -> None:
    rollouts = change(sound_rollouts(), lambda i, r: with_turn(r, output=output(i // G, i % G // copies)))
    check = check_of(rollouts, "identical completions")
    assert (check.status, check.value) == (status, float(copies > 1))


def test_copies_of_some_outputs() -> None:
    rollouts = change(sound_rollouts(), lambda i, r: with_turn(r, output=output(i // G, max(i % G, 2))))
    check = check_of(rollouts, "identical completions")
    np.testing.assert_allclose(check.value, 3 / 8)
    assert check.status == "warning"


def test_a_template_across_prompts() -> None:
    rollouts = change(sound_rollouts(), lambda i, r: with_turn(r, output=output(0, i % G)))
    check = check_of(rollouts, "identical completions")
    assert check.status == "warning"
    assert "different prompt" in check.reading


@pytest.mark.parametrize(("words", "status"), [(1, "info"), (6, "warning")])
def test_short_answers_may_coincide(words: int, status: str) -> None:
    rollouts = change(sound_rollouts(), lambda i, r: with_turn(r, output=" ".join([f"q{i // G}"] * words)))
    assert check_of(rollouts, "identical completions").status == status


@pytest.mark.parametrize(("cut", "status"), [(0, "ok"), (2, "info"), (8, "warning"), (40, "critical")])
def test_truncation(cut: int, status: str) -> None:
    rollouts = change(sound_rollouts(), lambda i, r: with_turn(r, finish_reason="length" if i < cut else "stop"))
    check = check_of(rollouts, "truncation")
    assert (check.status, check.value) == (status, cut / 80)
    unknown = change(rollouts, lambda i, r: with_turn(r, finish_reason=None))
    assert check_of(unknown, "truncation").status == "skipped"


def plain(i: int, rollout: Rollout) -> Rollout:
    return with_turn(rollout, output=f"Some words, then {i} {output(i // G, i % G)[7:40]}")


def never_closed(i: int, rollout: Rollout) -> Rollout:
    return with_turn(rollout, output=f"<think>on and on {output(i // G, i % G)[7:40]}") if i % 4 == 0 else rollout


def no_answer(i: int, rollout: Rollout) -> Rollout:
    return with_turn(rollout, output=output(i // G, i % G).split("<answer>")[0]) if i % 4 == 0 else rollout


@pytest.mark.parametrize(
    ("edit", "declared", "status", "words"),
    [
        (plain, None, "skipped", "no format was declared"),
        (plain, TagFormat(), "critical", "0% of the outputs are in the format"),
        (never_closed, None, "warning", "25% of the outputs open <think> and never close it"),
        (never_closed, TagFormat(), "warning", "75% of the outputs are in the format (unclosed think 25%)"),
        (no_answer, None, "warning", "75% of the outputs are in the format (no answer 25%)"),
    ],
)
def test_format(edit: Callable[[int, Rollout], Rollout], declared: object, status: str, words: str) -> None:
    check = check_of(change(sound_rollouts(), edit), "format", format=declared)
    assert check.status == status
    assert words in check.reading


def test_rewards_all_the_same() -> None:
    report = report_of(change(sound_rollouts(), lambda i, r: replace(r, reward=0.5, success=None)))
    assert named(report, "rewards").status == "warning"
    assert "same reward, 0.5" in named(report, "rewards").reading
    assert named(report, "prompts without signal").status == "skipped"
    assert named(report, "spread of reward variance").status == "skipped"


def test_rewards_that_punish_success() -> None:
    check = check_of(change(sound_rollouts(), lambda i, r: replace(r, reward=-r.reward)), "rewards")  # type: ignore[operator]
    assert check.status == "critical"
    assert "solved rollouts get -1" in check.reading


@pytest.mark.parametrize(("missing", "status"), [(0, "ok"), (2, "info"), (20, "warning")])
def test_rollouts_without_a_reward(missing: int, status: str) -> None:
    rollouts = change(
        sound_rollouts(), lambda i, r: replace(r, reward=None if i % 4 == 0 and i < 4 * missing else r.reward)
    )
    check = check_of(rollouts, "rewards")
    assert check.status == status
    assert check.rows == ((0, 4, 8, 12, 16) if status == "warning" else ())


@pytest.mark.parametrize("reward", ["0.5", True, {"total": 1.0}])
def test_rewards_that_are_no_numbers_are_refused(reward: object) -> None:
    rollouts = change(sound_rollouts(), lambda i, r: replace(r, reward=reward) if i == 5 else r)  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="rollout 5"):
        report_of(rollouts)


def test_a_reward_that_overflowed_is_told_and_decides_nothing() -> None:
    rollouts = change(sound_rollouts(), lambda i, r: replace(r, success=i % 2 == 0, reward=float(i % 2 == 0)))
    report = report_of(change(rollouts, lambda i, r: replace(r, reward=float("inf")) if i == 5 else r))  # a failed one
    rewards = named(report, "rewards")
    assert (rewards.status, rewards.value) == ("info", report.values["reward/mean"])
    assert rewards.reading.endswith("; left out, without a reward: 1 rollout.")
    assert any(note.startswith("left out as unscored: reward inf of rollout 5 (group") for note in report.notes)


def graded(solved_prompts: int, failed_prompts: int) -> list[Rollout]:
    def edit(i: int, rollout: Rollout) -> Rollout:
        p = i // G
        success = p < solved_prompts or (p < P - failed_prompts and i % G < 4)
        return replace(rollout, success=success, reward=float(success))

    return change(sound_rollouts(), edit)


@pytest.mark.parametrize(
    ("solved", "failed", "status", "words"),
    [
        (0, 0, "ok", "rewards differ within every prompt"),
        (2, 1, "ok", "30% of the prompts have equal rewards throughout"),
        (6, 0, "info", "saturation, not ill health"),
        (9, 0, "info", "saturation, not ill health"),
        (0, 6, "warning", "too hard for this policy"),
        (0, 9, "critical", "too hard for this policy"),
    ],
)
def test_prompts_without_signal(solved: int, failed: int, status: str, words: str) -> None:
    check = check_of(graded(solved, failed), "prompts without signal")
    assert check.status == status
    assert words in check.reading
    np.testing.assert_allclose(check.value, (solved + failed) / P)
    if solved + failed:
        p = (8 * solved + 4 * (P - solved - failed)) / (8 * P)
        assert f"{percent(p**8 + (1 - p) ** 8)} would be by chance" in check.reading


def test_without_success_labels_nobody_says_solved_or_failed() -> None:
    rollouts = change(graded(9, 0), lambda i, r: replace(r, success=None))
    check = check_of(rollouts, "prompts without signal")
    assert check.status == "warning"
    assert "success threshold" in check.action
    with_threshold = check_of(rollouts, "prompts without signal", success_threshold=0.5)
    assert with_threshold.status == "info"


def test_spread_of_reward_variance() -> None:
    few_teach = check_of(graded(8, 0), "spread of reward variance")
    np.testing.assert_allclose(few_teach.value, 2.0)  # variances: 8 zeros, 2 equal
    assert few_teach.status == "ok"
    assert "worth trying" in few_teach.action
    all_teach = check_of(graded(0, 0), "spread of reward variance")
    assert (all_teach.status, all_teach.value) == ("info", 0.0)
    assert "Do not filter" in all_teach.action


@pytest.mark.parametrize(("solved", "failed", "status"), [(0, 0, "ok"), (9, 0, "info"), (0, 10, "critical")])
def test_pass_at_k(solved: int, failed: int, status: str) -> None:
    check = check_of(graded(solved, failed), "pass@k")
    assert check.status == status
    np.testing.assert_allclose(check.value, 1 - failed / P)


def test_tool_calls() -> None:
    good, bad = make_call("f", "{}", "The value is 711."), make_call("f", "{", "Error: no JSON")

    def calling(call: object, then: str) -> list[Rollout]:
        def edit(i: int, rollout: Rollout) -> Rollout:
            last = Turn(context="later", output=f"{then} {i}", finish_reason="stop")
            return replace(rollout, turns=(replace(rollout.turns[0], tool_calls=(call,)), last))

        return change(sound_rollouts(), edit)

    used, ignored = check_of(calling(good, "So 711."), "tool calls"), check_of(calling(good, "Whatever."), "tool calls")
    assert (used.status, used.value) == ("ok", 1.0)
    assert "100% of 80 results" in used.reading
    assert (ignored.status, ignored.value) == ("info", 0.0)
    malformed = check_of(calling(bad, "Hm."), "tool calls")
    assert (malformed.status, malformed.value) == ("warning", 1.0)
    ids_only = [Rollout(turns=(Turn(context_ids=[1], output_ids=[g]),), group=0, reward=float(g)) for g in range(4)]
    assert "token ids only" in check_of(ids_only, "tool calls").reading


# --- with a policy -------------------------------------------------------------------------------------------------


def test_retrieval_of_a_policy_that_reads_its_prompt_and_of_one_that_does_not() -> None:
    healthy, template = planted("healthy"), planted("template")
    check = named(preflight(healthy.batch, matrix=healthy.matrix), "retrieval")
    assert check.status in ("ok", "info")
    assert check.interval is not None
    assert check.interval[0] > 1 / 8
    lost = named(preflight(template.batch, matrix=template.matrix), "retrieval")
    assert lost.status == "critical"
    assert "mis-paired" in lost.action
    np.testing.assert_allclose(lost.value, 1 / 8)


def test_prompts_paired_with_the_wrong_outputs() -> None:
    healthy = planted("healthy")
    m = healthy.matrix
    shifted = LogLikelihoodMatrix(logp_NP=m.logp_NP, length_N=m.length_N, own_N=(m.own_N + 1) % 8)
    assert named(preflight(healthy.batch, matrix=shifted), "retrieval").status == "critical"


def test_two_or_three_prompts_cannot_tell_retrieval_from_chance() -> None:
    healthy = planted("healthy", n_contexts=3)
    check = named(preflight(healthy.batch, matrix=healthy.matrix), "retrieval")
    assert check.status == "skipped"
    assert "3 distinct prompts are too few" in check.reading


def test_saturated_information_is_named() -> None:
    own = np.repeat(np.arange(6), 4)
    logp = np.where(np.arange(6) == own[:, None], -1.0, -90.0)
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=np.full(24, 5), own_N=own)
    check = check_of(sound_rollouts(), "retrieval", matrix=matrix)
    assert check.status == "info"
    assert "more prompts" in check.action


# --- real batches --------------------------------------------------------------------------------------------------


def test_healthy_saturation_is_not_called_collapse() -> None:
    """100 real prompts x 8, 90% of the groups all equal because they are solved. Kept are the outputs' last words, that
    coincide where the outputs do not, so each gets a number of its own.
    """
    rows = [json.loads(line) for line in (DATA / "simplerl_math_100x8_endings.jsonl").read_text().splitlines()]
    rollouts = [
        Rollout(turns=(Turn(context=f"{p}", output=f"{g} {text}"),), group=p, reward=float(score), success=score)
        for p, row in enumerate(rows)
        for g, (text, score) in enumerate(zip(row["ending"], row["score"], strict=True))
    ]
    report = report_of(rollouts)
    check = named(report, "prompts without signal")
    assert (check.status, check.value) == ("info", 0.9)
    assert not report.reaches("warning")
    for check in report.checks:
        assert "collapse" not in check.reading
    assert named(report, "pass@k").status == "info"


def test_two_of_six_real_groups_are_all_equal() -> None:
    groups = json.loads((DATA / "atropos_rubiks_6x4_scores.json").read_text())
    rollouts = [
        Rollout(turns=(Turn(output=f"{p} {g}"),), group=p, reward=score)
        for p, scores in enumerate(groups)
        for g, score in enumerate(scores)
    ]
    np.testing.assert_allclose(check_of(rollouts, "prompts without signal").value, 2 / 6)


# --- the report ----------------------------------------------------------------------------------------------------


def test_severities_in_order() -> None:
    critical = report_of(graded(0, 10))
    assert critical.status == "critical"
    assert [critical.reaches(s) for s in ("info", "warning", "critical")] == [True, True, True]  # type: ignore[arg-type]
    assert critical.headline.startswith("critical: ")
    with pytest.raises(SettingsError, match="severity 'error' does not exist"):
        critical.reaches("error")  # type: ignore[arg-type]
    only_skipped = PreflightReport(
        step=0, n_rollouts=1, n_groups=1, checks=(Check(name="x", status="skipped", reading="y."),)
    )
    assert only_skipped.status == "skipped"
    assert not only_skipped.reaches("info")


def test_what_the_source_left_out_is_noted() -> None:
    batch = RolloutBatch(
        step=0, rollouts=tuple(sound_rollouts()), dropped={"padding_row": 8, "none": 0}, approximate_ids=True
    )
    notes = preflight(batch).notes
    assert "the source left out 8 rows: padding row" in notes
    assert any("re-tokenising" in note for note in notes)
    assert not any("none" in note for note in notes)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(RolloutError, match="of run/a has no rollout"):
        preflight(RolloutBatch(step=0, rollouts=(), source="run/a"))
