"""Verdicts in words and as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import collapsediag as cd
from collapsediag.errors import ScoringError, SettingsError
from collapsediag.findings import verdict_lines
from collapsediag.findings.words import sentence
from collapsediag.record import Record
from collapsediag.testing import TableScorer


def falling(*calls: float, **more: float) -> cd.Verdict:
    return cd.judge(
        Record(step=i, values={"tools/calls_per_rollout": c, **{k.replace("__", "/"): v for k, v in more.items()}})
        for i, c in enumerate(calls)
    )


COLLAPSED = (2.0, 2.0, 2.0, 2.0, 2.0, 0.1, 0.1, 0.1)


def test_the_headline_is_said_once_and_other_findings_follow() -> None:
    lines = verdict_lines(falling(*COLLAPSED, length__truncated_fraction=0.5), width=80)
    text = " ".join(line.strip() for line in lines)
    assert text.count("TOOL-USE COLLAPSE since step 5 (3 measured steps in a row). Tool calls per rollout 0.1") == 1
    assert text.startswith("Rule out first: turns are cut off. TOOL-USE COLLAPSE")
    assert " warning  Turns are cut off since step 0 (8 measured steps in a row)." in text
    assert max(map(len, lines)) <= 80


def test_a_look_alike_that_explains_nothing_here_is_news_of_its_own() -> None:
    copies = {"diversity__identical_completion_fraction": 0.9, "length__mean": 40.0}
    headline = falling(*COLLAPSED, **copies).headline
    assert headline.startswith("TOOL-USE COLLAPSE since step 5")
    assert "Also: completions of one prompt are byte-identical." in headline
    assert "Rule out first" not in headline


def test_an_abbreviation_keeps_its_capitals_inside_a_sentence() -> None:
    found = [
        cd.Finding(check="mi_saturation", status="warning", title="MI at its bound"),
        cd.Finding(check="format_loss", status="warning", title="Format loss"),
        cd.Finding(check="tool_use_collapse", status="critical", title="Tool-use collapse"),
    ]
    headline = cd.Verdict(findings=tuple(found), n_steps=1, n_scored=0).headline
    assert "Also: MI at its bound; format loss." in headline


def test_the_name_of_an_environment_cannot_write_to_the_terminal() -> None:
    evil = "a\x1b[31m\u202eb"
    rewards = [1.0] * 5 + [0.1] * 5
    verdict = cd.judge(
        Record(step=i, values={f"env/{evil}/reward/mean": r, "env/b/reward/mean": 1.0, "reward/mean": 1.0})
        for i, r in enumerate(rewards)
    )
    assert verdict["environment_collapse"].is_alarm
    for said in (verdict.headline, *verdict_lines(verdict, every=True), sentence(verdict["environment_collapse"])):
        assert said.isprintable()
    assert "a\\x1b[31m\\u202eb" in verdict.headline.lower()


def test_a_silent_verdict_says_what_was_checked() -> None:
    verdict = falling(*[2.0] * 8)
    assert verdict_lines(verdict, width=1000) == [verdict.headline]
    assert verdict.headline.startswith(
        "No sign of collapse in what was checked; no step was scored, so whether reasoning depends on its prompt was "
        "not looked at. 1 check ran, 16 skipped (no scored "
    )
    listed = verdict_lines(verdict, width=1000, every=True)
    assert len(listed) == 1 + 17
    assert "      ok  Tools are used as at the start. Tool calls per rollout 2, at the start 2." in listed
    assert " skipped  entropy_collapse: skipped, no token entropies." in listed


class Broken:
    def score(self, pairs: cd.ScoringPairs) -> cd.LogLikelihoodMatrix:
        raise ScoringError("out of memory.")


def monitored(scorer: Any, prompts: Sequence[Any], completions: Sequence[Any], steps: int = 6) -> cd.Verdict:
    rewards = [float(i % 2) for i in range(len(prompts))]
    with cd.Monitor(scorer, every=1, reasoning="completion") as monitor:
        return cd.judge(
            monitor.observe(
                step,
                cd.RolloutBatch.from_lists(step=step, prompts=prompts, completions=completions, rewards=rewards),
            )
            for step in range(steps)
        )


IDS = [[1, p] for p in range(4) for _ in range(2)], [[5 + p, 9, i] for p in range(4) for i in range(2)]
TABLE = TableScorer(lambda context, trace: -1.0 if context[-1] == trace[0] - 5 else -9.0)


def test_a_run_of_which_nothing_could_be_scored_says_so_first_and_how_to_go_on() -> None:
    texts = [f"what is {p} ?" for p in range(4) for _ in range(2)], [f"it is {i}" for i in range(8)]
    verdict = monitored(TABLE, *texts)
    assert verdict.headline.startswith(
        "Not known: no step could be scored (no reasoning to score among 8 turns (8 no token ids); "
        "tokenize_batch(batch, tokenizer) makes ids of text). Nothing else showed in what was checked. "
    )
    assert (verdict.status, verdict.alarms) == ("ok", ())
    loud = cd.Verdict(
        findings=(cd.Finding(check="truncation", status="warning", title="Turns are cut off"),),
        n_steps=1,
        n_scored=0,
        not_known="no step could be scored",
    )
    assert loud.headline.startswith("TURNS ARE CUT OFF. Not known: no step could be scored. ")


def test_a_run_whose_scoring_was_switched_off_names_the_cause() -> None:
    said = "no step could be scored (out of memory; switched off after 3 failures in a row)"
    assert monitored(Broken(), *IDS).headline.startswith(f"Not known: {said}. Nothing else showed in what was checked.")
    assert monitored(Broken(), *IDS, steps=1).headline.startswith(
        "Nothing could be checked: no step could be scored (out of memory). 0 checks ran"
    )


def test_a_run_too_short_for_a_collapse_to_be_named_is_not_called_free_of_it() -> None:
    said = "Not known: only 1 step scored, and a collapse of the reasoning is named after 3. Nothing else showed"
    assert monitored(TABLE, *IDS, steps=1).headline.startswith(said)
    assert monitored(TABLE, *IDS, steps=3).headline.startswith("No sign of collapse in what was checked. ")


def test_a_run_that_was_not_to_be_scored_is_told_without_alarm_that_it_was_not() -> None:
    verdict = monitored(None, *IDS)
    assert verdict.headline.startswith("No sign of collapse in what was checked; no step was scored, so ")
    assert verdict.not_known == ""


def test_str_is_what_a_terminal_shows() -> None:
    verdict = falling(*COLLAPSED)
    assert str(verdict) == "\n".join(verdict_lines(verdict))


def test_several_alarms_are_all_named_the_gravest_first() -> None:
    records = [
        Record(step=i, values={"tools/calls_per_rollout": c, "length/mean": 40.0 * c, "entropy/token_mean": e})
        for i, (c, e) in enumerate(zip(COLLAPSED, [1.0] * 5 + [0.4] * 3, strict=True))
    ]
    verdict = cd.judge(records)
    assert [f.check for f in verdict.alarms] == ["tool_use_collapse", "length_collapse", "entropy_collapse"]
    assert "Also: length collapse; entropy collapse." in verdict.headline


def test_levels() -> None:
    verdict = falling(*COLLAPSED)
    assert verdict.status == "critical"
    assert [verdict.reaches(level) for level in ("info", "warning", "critical")] == [True] * 3
    quiet = falling(*[2.0] * 8)
    assert [quiet.reaches(level) for level in ("info", "warning", "critical")] == [False] * 3
    with pytest.raises(SettingsError, match="'ok'"):
        verdict.reaches("ok")


def test_a_check_is_found_by_name() -> None:
    verdict = falling(*COLLAPSED)
    assert verdict["tool_use_collapse"].since_step == 5
    with pytest.raises(KeyError, match="template_collapse"):
        verdict["template"]


def test_a_verdict_is_json() -> None:
    verdict = falling(*COLLAPSED)
    line = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert (line["status"], line["headline"], len(line["findings"])) == ("critical", verdict.headline, 17)


def test_sentences_end_once() -> None:
    for verdict in (falling(*COLLAPSED, length__truncated_fraction=0.5), falling(*[2.0] * 8), cd.judge([])):
        for finding in verdict.findings:
            assert ".." not in sentence(finding)
            assert "  " not in sentence(finding)
            assert sentence(finding).endswith(".")
