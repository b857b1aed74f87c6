"""The parts of the veRL adapter that need no veRL: call plans, rows, dumps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapsediag.errors import ScoringError
from collapsediag.integrations.verl.dump import dump
from collapsediag.integrations.verl.rows import Row, batch_of, read_rows
from collapsediag.integrations.verl.scorer import Limits, WorkerScorer, check_rows, laid_out, last_line
from collapsediag.pairs import ScoringPairs, build_pairs
from collapsediag.readers import read_rollouts

LIMITS = Limits(temperature=0.7, row_tokens=12, micro_batch_tokens=24, vocabulary=50)


# -- calls -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 8))
def test_every_rank_gets_as_many_rows_and_every_pair_is_found_again(n_pairs: int, n_ranks: int) -> None:
    pairs = [([i], [i]) for i in range(n_pairs)]
    rows, place = laid_out(pairs, n_ranks)
    assert len(rows) % n_ranks == 0
    assert len(rows) - n_pairs < n_ranks
    assert [rows[p] for p in place] == pairs
    # veRL cuts consecutive parts; long pairs come first, so each part must begin with one of the first R.
    size = len(rows) // n_ranks
    assert sorted(rows[r * size][0][0] for r in range(n_ranks)) == [min(r, n_pairs - 1) for r in range(n_ranks)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "0 rows cannot be shared"),
        ([([1], [2])] * 3, "3 rows cannot be shared equally by 2 ranks"),
        ([([1], [2]), ([], [2])], "row 1 has no context"),
        ([([1], [2]), ([1], [])], "row 1 has no trace"),
        ([([1], [2]), ([1] * 10, [2] * 3)], "row 1 has 13 tokens but a row may have 12"),
        ([([1], [2]), ([1], [50])], "row 1 holds token 50 but the vocabulary has 50"),
        ([([1], [2]), ([-100], [2])], "row 1 holds token -100"),
    ],
)
def test_no_worker_hears_of_a_call_that_could_fail(rows: Any, said: str) -> None:
    with pytest.raises(ScoringError, match="nothing was sent") as found:
        check_rows(rows, 2, LIMITS)
    assert said in str(found.value)


class Workers:
    """Two ranks, and a language model that is a table of bigrams: an oracle without a network."""

    def __init__(self) -> None:
        logits = np.random.default_rng(0).normal(size=(50, 50))
        self.logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self._dispatch_info: dict[str, list[int]] = {}
        self.calls: list[int] = []

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh == "actor"
        return [0, 0, 1, 1]  # two tensor-parallel ranks each

    def trace_logp(self, context: list[int], trace: list[int]) -> list[float]:
        before = [context[-1], *trace[:-1]]
        return [float(self.logp[a, b]) for a, b in zip(before, trace, strict=True)]


def ask(workers: Workers, rows: Any, limits: Limits) -> list[Any]:
    workers.calls.append(len(rows))
    return [np.array(workers.trace_logp(context, trace)) for context, trace in rows]


def pairs_of(contexts: list[list[int]], traces: list[list[int]]) -> ScoringPairs:
    n, p = len(traces), len(contexts)
    return ScoringPairs(
        contexts=tuple(np.array(x) for x in contexts),
        traces=tuple(np.array(z) for z in traces),
        own_N=np.arange(n) % p,
        group_N=np.arange(n) % p,
        multiplicity_P=np.ones(p, dtype=np.int64),
        rollout_N=np.arange(n),
        turn_N=np.zeros(n, dtype=np.int64),
    )


def test_the_matrix_is_that_of_the_workers_over_several_calls() -> None:
    workers = Workers()
    contexts, traces = [[1], [2, 3], [4, 5, 6]], [[7], [8, 9], [7, 7, 7], [3], [2]]
    scorer = WorkerScorer(workers, ask, LIMITS, call_tokens=24)
    matrix = scorer.score(pairs_of(contexts, traces))
    expected = [[sum(workers.trace_logp(x, z)) for x in contexts] for z in traces]
    np.testing.assert_allclose(matrix.logp_NP, expected, atol=1e-12)
    assert len(workers.calls) > 1
    assert all(count % 2 == 0 for count in workers.calls)
    assert scorer.temperature == 0.7


def test_a_bad_row_stops_before_the_workers() -> None:
    workers = Workers()
    scorer = WorkerScorer(workers, ask, LIMITS, call_tokens=1000)
    with pytest.raises(ScoringError, match="row 0 has 14 tokens"):
        scorer.score(pairs_of([[1] * 10, [2]], [[3] * 4, [4]]))
    assert workers.calls == []


def test_the_reason_of_a_remote_error_is_one_line() -> None:
    def fail(workers: Any, rows: Any, limits: Limits) -> Any:
        raise RuntimeError("ray::compute_log_prob()\n  File x\n  ValueError: the reason\n")

    with pytest.raises(ScoringError) as found:
        WorkerScorer(Workers(), fail, LIMITS, call_tokens=10).score(pairs_of([[1], [2]], [[3], [4]]))
    assert str(found.value).endswith("failed on the workers: RuntimeError: ValueError: the reason")
    assert "\n" not in str(found.value)
    assert last_line(KeyError()) == "KeyError: (no message)"


# -- rows ------------------------------------------------------------------------------------------------------------


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "group": "u1",
        "prompt": np.array([1, 2]),
        "response": np.array([5, 6, 7, 8, 9]),
        "mask_R": np.array([1, 1, 0, 1, 1]),
        "logp_R": np.array([-0.1, -0.2, -9.0, -0.3, -0.4]),
        "reward": 0.5,
    }
    return Row(**{**values, **changes})


def test_turns_follow_the_mask_and_extras_the_rules_of_the_reader() -> None:
    extra = {"acc": 1.0, "score": 0.5, "fluency": 0.25, "broken": float("nan"), "pred": "47"}
    batch = batch_of(
        [row(extra=extra), row(group="u2", mask_R=np.zeros(5, dtype=int))],
        step=3,
        end_tokens=(9,),
        limit=5,
        temperature=0.7,
        dropped={"padding_row": 2},
    )
    (rollout,) = batch.rollouts
    assert [t.output_ids.tolist() for t in rollout.turns] == [[5, 6], [8, 9]]  # type: ignore[union-attr]
    assert rollout.turns[1].context_ids.tolist() == [1, 2, 5, 6, 7]  # type: ignore[union-attr]
    assert rollout.turns[1].logprobs.tolist() == [-0.3, -0.4]  # type: ignore[union-attr]
    assert [t.finish_reason for t in rollout.turns] == [None, "stop"]
    assert rollout.success is True
    assert dict(rollout.rewards) == {"fluency": 0.25, "broken": None}
    assert batch.dropped == {"padding_row": 2, "no_policy_tokens": 1}
    assert batch.max_output_tokens is None  # the limit is the trajectory's


@pytest.mark.parametrize(("end", "limit", "reason"), [(9, 5, "stop"), (4, 5, "length"), (4, 6, None)])
def test_truncation_is_the_limit_without_an_end(end: int, limit: int, reason: str | None) -> None:
    made = batch_of(
        [row(mask_R=np.ones(5, dtype=int))], step=1, end_tokens=(end,), limit=limit, temperature=1, dropped={}
    )
    assert made.rollouts[0].turns[0].finish_reason == reason


def test_padded_rows_are_cut_by_the_mask_and_come_in_the_order_of_their_tokens() -> None:
    torch = pytest.importorskip("torch")
    # Token 0 pads on the left and is a real token of the second prompt; the end token 9 pads on the right.
    tensors = {
        "prompts": torch.tensor([[0, 0, 7], [0, 3, 4]]),
        "responses": torch.tensor([[5, 9, 9], [6, 8, 9]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        "token_level_scores": torch.tensor([[0.0, 1.5, 0.0], [0.0, 0.0, -1.0]]),
        "old_log_probs": torch.tensor([[-1.0, 1e-9, 0.0], [-3.0, -4.0, -5.0]]),
        "advantages": torch.tensor([[2.0, 4.0, 0.0], [1.0, 9.0, 3.0]]),
    }
    before = {name: value.clone() for name, value in tensors.items()}
    objects = {
        "uid": np.array(["a", "b"], dtype=object),
        "data_source": np.array(["math", "code"], dtype=object),
        "acc": np.array([1.0, 0.0], dtype=object),
    }

    class Batch:
        batch, non_tensor_batch, meta_info = tensors, objects, {"reward_extra_keys": ["acc", "not_there"]}

        def __len__(self) -> int:
            return 2

    rows, dropped = read_rows(Batch())
    assert dropped == {}
    assert [r.group for r in rows] == ["b", "a"]
    assert [r.prompt.tolist() for r in rows] == [[0, 3, 4], [7]]
    assert [r.response.tolist() for r in rows] == [[6, 8, 9], [5, 9]]
    assert [r.mask_R.tolist() for r in rows] == [[1, 0, 1], [1, 1]]
    assert [r.reward for r in rows] == [-1.0, 1.5]
    assert [r.logp_R.tolist() for r in rows] == [[-3, -4, -5], [-1, 0]]  # type: ignore[union-attr]
    assert [r.advantage for r in rows] == [2.0, 3.0]
    assert [r.environment for r in rows] == ["code", "math"]
    assert [dict(r.extra) for r in rows] == [{"acc": 0.0}, {"acc": 1.0}]
    assert all(torch.equal(before[name], tensors[name]) for name in before)


def test_rows_of_the_queue_are_read_without_padding_and_by_who_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    asked: list[Any] = []

    def jagged(*values: list[float]) -> Any:
        return torch.nested.as_nested_tensor([torch.tensor(v) for v in values], layout=torch.jagged)

    fields = {
        "prompts": jagged([7, 8], [3]),
        "responses": jagged([5, 6], [6, 8, 9]),
        "loss_mask": jagged([1, 1], [1, 0, 1]),
        "response_mask": jagged([0, 0], [1, 0, 1]),  # the first was rejected after the fact
        "rm_scores": jagged([0.0, 1.5], [0.0, 0.0, 0.25]),
        "old_log_probs": jagged([-1.0, -2.0], [-3.0, -4.0, -5.0]),
        "extra_fields": np.array([{"reward_extra_info": {"acc": 1.0}}, {}], dtype=object),
    }

    def get(**names: Any) -> Any:
        asked.append(names)
        return fields

    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_get=get))  # a queue needs a cluster
    tags = [{"min_global_steps": 4}, {"is_padding": True}, {"min_global_steps": 3}]
    batch = SimpleNamespace(keys=["u_1_0_0", "pad9", "u_2_1_0"], tags=tags, partition_id="train")
    rows, dropped = read_rows(batch)
    assert dropped == {"padding_row": 1}
    assert asked[0]["keys"] == ["u_1_0_0", "u_2_1_0"]
    assert [r.group for r in rows] == ["u_2", "u_1"]
    assert [r.mask_R.tolist() for r in rows] == [[1, 0, 1], [1, 1]]
    assert [r.reward for r in rows] == [0.25, 1.5]
    assert [r.weights_from for r in rows] == [3, 4]
    assert [dict(r.extra) for r in rows] == [{}, {"acc": 1.0}]


def test_the_order_of_rows_is_that_of_token_numbers() -> None:
    ids = [[300, 1], [2], [300], [1, 70000], [256]]
    ordered = sorted((row(prompt=np.array(p)) for p in ids), key=lambda r: r.sort_key)
    assert [r.prompt.tolist() for r in ordered] == sorted(ids)


# -- dumps -----------------------------------------------------------------------------------------------------------


def test_a_dump_read_back_gives_the_same_pairs(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for i in range(12):
        size = int(draw.integers(3, 7))
        mask = np.ones(size, dtype=int)
        mask[1] = i % 3 > 0
        rows.append(
            row(
                group=f"u{i // 4}",
                id=f"u{i // 4}_{i % 4}_0",
                prompt=np.array([1, 2, i // 4]),
                response=draw.integers(3, 40, size),
                mask_R=mask,
                logp_R=-draw.random(size),
                entropy_R=draw.random(size),
                environment=f"e{i % 2}",
                extra={"acc": i % 2, "fluency": 0.5},
                reward=None if i == 5 else float(i),
                advantage=0.25 * i,
            )
        )
    rows.append(row(group="u9", mask_R=np.zeros(5, dtype=int)))
    made = batch_of(rows, step=7, end_tokens=(9, 8), limit=6, temperature=0.7, dropped={})
    killed = tmp_path / "rollouts" / f".collapsediag-{'0' * 16}.tmp"
    killed.parent.mkdir()
    killed.touch()
    os.utime(killed, (0, 0))  # long ago
    path = dump(tmp_path / "rollouts", rows, made)
    assert path.name == "7.jsonl"
    assert [p.name for p in path.parent.iterdir()] == ["7.jsonl"]
    assert json.loads(path.read_text().splitlines()[0])["group"] == "u0"

    (read,) = read_rollouts(tmp_path / "rollouts")
    assert (read.step, read.temperature, read.eos_token_ids) == (7, 0.7, (9, 8))
    assert len(read) == len(made) == 12
    for ours, theirs in zip(made, read, strict=True):
        assert (ours.group, ours.environment, ours.reward) == (theirs.group, theirs.environment, theirs.reward)
        assert (ours.success, ours.advantage) == (theirs.success, theirs.advantage)
        assert dict(theirs.rewards) == ({} if ours.reward is None else dict(ours.rewards))
        assert len(ours.turns) == len(theirs.turns)
        for a, b in zip(ours.turns, theirs.turns, strict=True):
            np.testing.assert_array_equal(a.context_ids, b.context_ids)
            np.testing.assert_array_equal(a.output_ids, b.output_ids)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
            np.testing.assert_array_equal(a.entropies, b.entropies)
    for namespace in ("first_turn", "trajectory", "turn"):
        ours_, theirs_ = (
            build_pairs(b, reasoning="completion", namespace=namespace, max_traces=5, max_contexts=3)
            for b in (made, read)
        )
        assert [z.tolist() for z in ours_.traces] == [z.tolist() for z in theirs_.traces]
        assert [x.tolist() for x in ours_.contexts] == [x.tolist() for x in theirs_.contexts]
