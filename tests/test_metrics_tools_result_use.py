"""Does the policy use its tools' results? Hand-made cases, hand-labelled real ones, and a slow second opinion."""

from __future__ import annotations

import json
import re
import time
import timeit
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from collapsediag.metrics.result_use import _WORD, Event, _words, judge_results
from collapsediag.metrics.tool_parsers import make_call
from collapsediag.metrics.tool_use import _RolloutReader, read_tool_use
from collapsediag.rollouts import Rollout, Turn

LABELLED = Path(__file__).parent / "data" / "tool_results_labelled.jsonl"


def judge(seen: str, result: str, wrote: str) -> bool | None:
    return judge_results([("seen", seen), ("result", result), ("wrote", wrote)])[0]


@pytest.mark.parametrize(
    ("seen", "result", "wrote"),
    [
        ("What is the value of Warm?", '{"synonym_value": 407}', "extract [711, 407]"),
        ("What is the value of Warm?", '{"synonym_value": 407}', '{"synonym_values":[711,407]}'),
        ("How many people live there?", "Population: 1,234,567.", "About 1234567 people."),
        ("How far is it?", "It is 55.610 km away", "So 55.61 km."),
        ("Which country?", '["Belize", "Guatemala"]', "The answer is Guatemala."),
        ("Which event?", "name=FESTIVAL24", "I book FESTIVAL24 now."),
        (
            "Where do impulses start?",
            "They start in the sinoatrial node of the heart.",
            "<answer>the sinoatrial node</answer>",
        ),
        ("Qui?", "écrit par Hélène Dubois", "C'est Hélène."),
        ("作者是谁?", "作者是鲁迅。", "答案: 是鲁迅。"),
    ],
)
def test_use_is_seen(seen: str, result: str, wrote: str) -> None:
    assert judge(seen, result, wrote) is True


@pytest.mark.parametrize(
    ("seen", "result", "wrote"),
    [
        # Nothing of it comes back.
        ("What is the value of Warm?", '{"synonym_value": 407}', "extract [711]"),
        ("Which country?", '["Belize", "Guatemala"]', "The answer is Panama."),
        # Only what was known before comes back.
        ("Is Guatemala or 407 right?", "Guatemala has 407 lakes in 1998", "Guatemala, 407."),
        # Known words in a new order are not specific.
        ("red cars and blue boats of the film", "the blue film of cars Zeppelin", "the blue film of boats"),
        # A number within another number, a name within another word, other capitals.
        ("Value?", "It is 407.", "I say 14071 and 4.07 and v407x."),
        ("Which?", "It is called Rose here", "The roses rose, Rosebud."),
        # Words that open sentences are no names.
        ("Which?", "However, the lake was deep in 1998.", "However, I do not know."),
        # A short number in a list of steps.
        ("Which?", "Take 12 eggs, Mildred", "12. Stir."),
    ],
)
def test_what_is_no_use(seen: str, result: str, wrote: str) -> None:
    assert judge(seen, result, wrote) is False


@pytest.mark.parametrize("result", ["", "[]", '{"success": true}', "5", "true", "the question was known"])
def test_a_result_without_a_span_of_its_own_is_not_judged(result: str) -> None:
    assert judge('the question was known {"success": true}', result, "true 5 the question was known") is None


def test_a_result_that_nothing_follows_is_not_judged() -> None:
    assert judge_results([("wrote", "Look up."), ("result", "Guatemala 1998")]) == (None,)
    assert judge_results([("result", "Guatemala 1998"), ("wrote", " \n")]) == (None,)
    assert judge_results([("result", "Guatemala 1998"), ("seen", "It is Guatemala, said the user.")]) == (None,)


def test_what_the_call_itself_said_is_not_the_results() -> None:
    events: list[Event] = [("wrote", '{"city": "Ulm", "year": 1879}'), ("result", "Ulm 1879"), ("wrote", "Ulm 1879")]
    assert judge_results(events) == (None,)


def test_a_span_belongs_to_the_first_result_that_held_it() -> None:
    events: list[Event] = [("result", "Belize Guatemala"), ("result", "Guatemala Panama"), ("wrote", "Guatemala.")]
    assert judge_results(events) == (True, False)


def test_words_before_the_result_are_not_use_of_it() -> None:
    assert judge_results([("wrote", "I guess Guatemala."), ("result", "Belize Guatemala"), ("wrote", "Done.")]) == (
        False,
    )


def slow_opinion(events: Sequence[Event]) -> tuple[bool | None, ...]:
    """The definition word by word, for lower-case words and numbers: nested loops, no sets, no hashing."""

    def words(text: str) -> list[str]:
        return re.findall(r"\w+", text)

    def holds(text: str, span: list[str]) -> bool:
        w = words(text)
        return any(w[i : i + len(span)] == span for i in range(len(w) - len(span) + 1))

    verdicts: list[bool | None] = []
    for at, (kind, text) in enumerate(events):
        if kind != "result":
            continue
        before = [t for _, t in events[:at]]
        own = [[w] for w in words(text) if w.isdigit() and len(w) >= 3 and not any(holds(t, [w]) for t in before)]
        w = words(text)
        for i in range(len(w) - 2):
            span = w[i : i + 3]
            if any(not any(holds(t, [word]) for t in before) for word in span):
                own.append(span)
        after = [t for k, t in events[at + 1 :] if k == "wrote" and words(t)]
        verdicts.append(any(holds(t, span) for t in after for span in own) if own and after else None)
    return tuple(verdicts)


def test_a_slow_second_opinion_agrees_on_random_rollouts() -> None:
    rng = np.random.default_rng(7)
    vocabulary = [*"abcdefghij", "12", "345", "6789"]
    seen: Counter[bool | None] = Counter()
    for _ in range(1500):
        kinds = rng.choice(["seen", "wrote", "result"], size=rng.integers(1, 9))
        events: list[Event] = [(str(k), " ".join(rng.choice(vocabulary, size=rng.integers(0, 7)))) for k in kinds]  # type: ignore[misc]
        expected = slow_opinion(events)
        assert judge_results(events) == expected, events
        seen.update(expected)
    assert min(seen[True], seen[False], seen[None]) > 50


def test_the_fast_way_of_cutting_ascii_words_is_the_pattern() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        text = "".join(map(chr, rng.integers(0, 128, size=40)))
        assert _words(text) == _WORD.findall(text)
    assert _words("naïve 東京 x_1") == ["naïve", "東", "京", "x_1"]


def test_time_is_linear_in_the_rollout() -> None:
    rng = np.random.default_rng(0)

    def seconds(turns: int) -> float:  # of this process, the best of five: others share the machine
        events: list[Event] = []
        for _ in range(turns):
            events.append(("wrote", " ".join(map(str, rng.integers(0, 10**6, size=60)))))
            events.append(("result", " ".join(map(str, rng.integers(0, 10**6, size=60)))))
        # timeit stops garbage collection, which goes through all that other tests have left.
        return min(timeit.repeat(lambda: judge_results(events), timer=time.process_time, number=1, repeat=5))

    seconds(50)
    assert seconds(800) < 64 * seconds(50)  # linear is 16, quadratic 256


# --- real results, labelled by hand ---------------------------------------------------------------------------------


def labelled() -> list[dict[str, object]]:
    return [json.loads(line) for line in LABELLED.read_text(encoding="utf-8").splitlines()]


def as_rollout(row: dict[str, object]) -> Rollout:
    """Each turn's context is all that came before it; `before` is what the environment said that was no tool result."""
    turns, context = [], ""
    for turn in row["turns"]:  # type: ignore[attr-defined]
        calls = turn.get("calls")
        context += turn["before"]
        turns.append(
            Turn(
                context=context,
                output=turn["output"],
                observation=turn.get("observation"),
                tool_calls=None
                if calls is None
                else tuple(make_call(c["name"], c["arguments"], c.get("result")) for c in calls),
            )
        )
        context += turn["output"] + (turn.get("observation") or "") + "".join(c["result"] for c in calls or ())
    return Rollout(turns=tuple(turns), group=0)


def test_error_rate_on_real_results_labelled_by_hand() -> None:
    """76 results, read before the rule was written: 37 used, 9 not, 28 with nothing of their own, 2 at the very end.

    The rule judges 43 of the 46 that a person can judge and errs in 4 (9%), always by missing a use: three boards read
    aloud as letters, one list of one-digit seat numbers. The 3 it does not judge are one-digit sums. One label was
    corrected after a disagreement made its reader look again ("Now I know about Americas." had been overlooked).
    """
    confusion: Counter[tuple[str, bool | None]] = Counter()
    for row in labelled():
        use = read_tool_use(as_rollout(row))
        assert use is not None
        confusion.update(zip(row["labels"], use.used, strict=True))  # type: ignore[call-overload]
    assert confusion == {
        ("used", True): 30,
        ("used", False): 4,
        ("used", None): 3,
        ("unused", False): 9,
        ("nothing", None): 28,
        ("last", None): 2,
    }


def test_results_of_other_rollouts_are_almost_never_called_used() -> None:
    """Chance level: each result is replaced by one from another source, which the policy cannot have read."""
    told: list[tuple[str, list[Event]]] = []
    for row in labelled():
        reader = _RolloutReader()
        earlier = None
        for turn in as_rollout(row).turns:
            reader.read(turn, earlier)
            earlier = turn
        told.append((str(row["source"]).split()[0], reader.events))
    results = [(source, text) for source, events in told for kind, text in events if kind == "result"]
    verdicts: Counter[bool | None] = Counter()
    rng = np.random.default_rng(3)
    for source, events in told:
        foreign = [text for other, text in results if other != source]
        for at in [i for i, (kind, _) in enumerate(events) if kind == "result"]:
            number = sum(kind == "result" for kind, _ in events[:at])
            for text in rng.choice(foreign, size=8, replace=False):
                verdicts[judge_results([*events[:at], ("result", str(text)), *events[at + 1 :]])[number]] += 1
    assert verdicts[False] > 300
    assert verdicts[True] / (verdicts[True] + verdicts[False]) < 0.01
