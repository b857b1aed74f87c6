"""Scoring over ranks: two real gloo processes against a float64 loop in this one.

All scenarios run in one pair of processes (starting them is what costs); each writes what it saw, the tests read it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.pairs import ScoringPairs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from collapsediag.scoring.distributed import DistributedScorer, is_sharded, raise_together, share_cells  # noqa: E402
from collapsediag.scoring.function import FunctionScorer  # noqa: E402

TIME_LIMIT_S = 240
FLOAT32_TOLERANCE = 1e-5  # nats per token

SETUP = """
import json, sys, os, copy, datetime
import numpy as np, torch, transformers
import torch.distributed as dist
from collapsediag.pairs import ScoringPairs

VOCABULARY = 97

def tiny_model(tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=tied,
        attention_dropout=0.1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model.train()

def some_pairs(n_contexts=5, group_size=2):
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCABULARY, 12)
    contexts = tuple(np.concatenate([shared, rng.integers(0, VOCABULARY, 3 + 4 * j)]) for j in range(n_contexts))
    traces = [rng.integers(0, VOCABULARY, size) for size in rng.integers(1, 30, n_contexts * group_size)]
    traces[-1] = traces[0]
    own = np.repeat(np.arange(n_contexts), group_size)
    zero = np.zeros(own.size, dtype=np.int64)
    return ScoringPairs(contexts=contexts, traces=tuple(traces), own_N=own, group_N=own,
                        multiplicity_P=np.ones(n_contexts, dtype=np.int64), rollout_N=zero, turn_N=zero)
"""
namespace: dict[str, Any] = {}
exec(SETUP, namespace)  # the worker processes run the same text
tiny_model, some_pairs = namespace["tiny_model"], namespace["some_pairs"]

WORKER = (
    SETUP
    + '''
from collapsediag.errors import ScoringError
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.budget import BudgetScorer
from collapsediag.scoring.distributed import DistributedScorer, forwards_in_step, gather_batch, raise_together
from collapsediag.scoring.function import FunctionScorer
from collapsediag.scoring.hf import HFScorer
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
seen = {}

def sharded(tied=False):
    model = tiny_model(tied)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model

def counting(model):
    counts = []
    model.register_forward_pre_hook(lambda module, args: counts.append(1))
    return counts

def logprobs(model, fails_at=None):
    """A trainer's function, one forward a batch; on rank 1 it fails before forward number `fails_at`."""
    calls = []
    def fn(batch):
        calls.append(len(batch))
        if rank == 1 and fails_at == len(calls):
            raise ValueError("no such reward")
        longest = max(len(c) + len(t) for c, t in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, (c, t) in enumerate(batch):
            ids[row, : len(c) + len(t)] = torch.tensor(c + t)
        with torch.no_grad():
            logp = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        logp = logp.gather(-1, ids[:, 1:, None])[..., 0]
        return [logp[r, len(c) - 1 : len(c) - 1 + len(t)] for r, (c, t) in enumerate(batch)]
    return fn

def scenario(name):
    def run(function):
        try:
            result = function()
        except ScoringError as error:
            seen[name] = {"error": str(error), "cause": repr(error.__cause__)}
        else:
            seen[name] = result
    return run

def values(matrix):
    return {"logp": matrix.logp_NP.tolist(), "scored": matrix.scored_NP.tolist()}

pairs = some_pairs()

@scenario("replicated")
def _():
    class Counted:
        cells = 0
        def score_cells(self, pairs, scored):
            Counted.cells += int(scored.sum())
            return HFScorer(tiny_model()).score_cells(pairs, scored)
    return values(DistributedScorer(Counted()).score(pairs)) | {"cells": Counted.cells}

@scenario("ddp")
def _():
    return values(DistributedScorer(HFScorer(DistributedDataParallel(tiny_model()))).score(pairs))

@scenario("ddp_function")
def _():
    model = DistributedDataParallel(tiny_model().eval())
    counts = counting(model)
    scorer = DistributedScorer(FunctionScorer(logprobs(model), batch_tokens=10**6 if rank else 1), model=model)
    return values(scorer.score(pairs)) | {"forwards": len(counts)}

for tied in (False, True):
    @scenario(f"fsdp2_tied={tied}")
    def _():
        model = sharded(tied)
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        hooks = [list(module._forward_pre_hooks) for module in model.modules()]
        scorer = DistributedScorer(HFScorer(model))
        counts = counting(model)
        result = values(scorer.score(pairs)) | {"forwards": len(counts), "path": scorer.inner.info.path}
        hooks_after = [list(module._forward_pre_hooks) for module in model.modules()]
        hooks_after[0] = hooks_after[0][:-1]  # the counter's own
        return result | {
            "same_hooks": hooks == hooks_after, "training": all(m.training for m in model.modules()),
            "same_rng": bool(torch.equal(before, torch.get_rng_state())),
        }

@scenario("fsdp2_unequal")
def _():
    """One context, one trace: a rank has nothing at all to do, and must run along."""
    one = some_pairs(1, 1)
    model = sharded()
    counts = counting(model)
    result = values(DistributedScorer(HFScorer(model)).score(one))
    return result | {"forwards": len(counts)}

@scenario("budget")
def _():
    return values(BudgetScorer(DistributedScorer(HFScorer(sharded())), k=2, seed=3).score(pairs))

failing = sharded().eval()
def failing_scorer(at):
    return DistributedScorer(FunctionScorer(logprobs(failing, at), batch_tokens=1), model=failing)

@scenario("failure_in_step")
def _():
    return values(failing_scorer(2).score(pairs))

@scenario("failure_at_once")
def _():
    return values(failing_scorer(1).score(pairs))

@scenario("after_failures")
def _():
    return values(failing_scorer(None).score(pairs))

@scenario("failure_replicated")
def _():
    return values(DistributedScorer(FunctionScorer(logprobs(tiny_model().eval(), 1), batch_tokens=1)).score(pairs))

@scenario("other_pairs")
def _():
    return values(DistributedScorer(HFScorer(tiny_model())).score(some_pairs(5, 2 + rank)))

@scenario("gathered")
def _():
    batch = RolloutBatch.from_lists(step=3, prompts=["a", f"b{rank}"], completions=[f"x{rank}", "y"],
                                    rewards=[float(rank), None], dropped={"padding_row": 2 + rank}, notes=("n",))
    whole = gather_batch(batch)
    return {"outputs": [r.turns[0].output for r in whole], "groups": [str(r.group) for r in whole],
            "rewards": [r.reward for r in whole], "dropped": dict(whole.dropped), "notes": list(whole.notes),
            "step": whole.step}

@scenario("failure_of_both")
def _():
    raise_together(ValueError(f"rank {rank}"), dist.new_group(backend="gloo"))

with open(f"{folder}/rank{rank}.json", "w") as stream:
    json.dump(seen, stream)

# Last: a rank that dies for good.
last = DistributedScorer(FunctionScorer(logprobs(tiny_model().eval())), timeout_s=10)
dist.barrier()
if rank == 1:
    os._exit(9)
try:
    last.score(pairs)
    died = "nothing noticed"
except Exception as error:
    died = type(error).__name__
with open(f"{folder}/died.txt", "w") as stream:
    stream.write(died)
os._exit(0)  # destroying a group whose other half is gone would wait for it
'''
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks saw, scenario by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(rank)], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, output in enumerate(outputs):
        assert (folder / f"rank{rank}.json").exists(), output[-4000:]
    found: list[dict[str, Any]] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    for one in found:
        one["died"] = (
            Path(folder / "died.txt").read_text() if Path(folder / "died.txt").exists() else outputs[0][-2000:]
        )
        one["codes"] = [process.returncode for process in processes]
    return found


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """One float64 forward per cell, in this process."""
    return oracle(some_pairs())


def oracle(pairs: ScoringPairs, tied: bool = False) -> np.ndarray:
    model = tiny_model(tied).double().eval()
    logp_NP = np.zeros((pairs.n_traces, pairs.n_contexts))
    for i, trace in enumerate(pairs.traces):
        for j, context in enumerate(pairs.contexts):
            ids = torch.tensor([[*context.tolist(), *trace.tolist()]])
            with torch.no_grad():
                logp = model(input_ids=ids).logits[0].log_softmax(-1)
            logp_NP[i, j] = sum(float(logp[len(context) - 1 + t, token]) for t, token in enumerate(trace.tolist()))
    return logp_NP


def assert_both(ranks: list[dict[str, Any]], name: str, logp_NP: np.ndarray, pairs: ScoringPairs) -> None:
    lengths = np.array([[len(trace)] for trace in pairs.traces])
    for rank in ranks:
        assert "error" not in rank[name], rank[name]
        found = np.array(rank[name]["logp"], dtype=float)
        scored = np.array(rank[name]["scored"])
        np.testing.assert_array_equal(np.isfinite(found), scored)
        error = np.where(scored, np.abs(np.nan_to_num(found) - logp_NP) / lengths, 0.0)
        assert error.max() < FLOAT32_TOLERANCE, f"{name}: off by {error.max():.2e} nats per token"
    np.testing.assert_array_equal(ranks[0][name]["logp"], ranks[1][name]["logp"])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["replicated", "ddp", "ddp_function", "fsdp2_tied=False", "after_failures"])
def test_the_matrix_is_the_single_process_one_on_both_ranks(
    ranks: list[dict[str, Any]], expected: np.ndarray, name: str
) -> None:
    assert_both(ranks, name, expected, some_pairs())
    assert np.array(ranks[0][name]["scored"]).all()


@pytest.mark.distributed
def test_tied_embeddings_under_fsdp2(ranks: list[dict[str, Any]]) -> None:
    assert_both(ranks, "fsdp2_tied=True", oracle(some_pairs(), tied=True), some_pairs())


@pytest.mark.distributed
def test_the_work_is_shared(ranks: list[dict[str, Any]]) -> None:
    cells = [rank["replicated"]["cells"] for rank in ranks]
    assert sum(cells) == 50
    assert min(cells) >= 15


@pytest.mark.distributed
def test_all_ranks_run_the_same_number_of_forwards(ranks: list[dict[str, Any]]) -> None:
    for name in ("ddp_function", "fsdp2_tied=False", "fsdp2_tied=True", "fsdp2_unequal"):
        counts = [rank[name]["forwards"] for rank in ranks]
        assert counts[0] == counts[1] > 0, name
    assert ranks[0]["fsdp2_tied=False"]["path"] == "prefix"


@pytest.mark.distributed
def test_a_rank_without_work_runs_along(ranks: list[dict[str, Any]]) -> None:
    one = some_pairs(1, 1)
    assert_both(ranks, "fsdp2_unequal", oracle(one), one)


@pytest.mark.distributed
def test_the_model_is_left_as_it_was(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for tied in (False, True):
            seen = rank[f"fsdp2_tied={tied}"]
            assert seen["same_hooks"]
            assert seen["training"]
            assert seen["same_rng"]


@pytest.mark.distributed
def test_a_budget_over_sharded_ranks(ranks: list[dict[str, Any]], expected: np.ndarray) -> None:
    assert_both(ranks, "budget", expected, some_pairs())
    scored = np.array(ranks[0]["budget"]["scored"])
    np.testing.assert_array_equal(scored.sum(axis=1), 3)
    np.testing.assert_array_equal(scored, ranks[1]["budget"]["scored"])


@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize("name", ["failure_in_step", "failure_at_once", "failure_replicated"])
def test_one_ranks_failure_is_everybodys(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert "rank 1 of 2 failed" in rank[name]["error"]
        assert "no such reward" in rank[name]["error"]
    assert ranks[0][name]["cause"] == "None"
    assert "ScoringError" in ranks[1][name]["cause"]


@pytest.mark.distributed
@pytest.mark.faults
def test_failures_everywhere_are_counted(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["failure_of_both"]["error"] == "rank 0 of 2 failed (and 1 more ranks): ValueError: rank 0"


@pytest.mark.distributed
@pytest.mark.faults
def test_ranks_with_other_pairs_are_told(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "rank 1 was given other pairs to score than rank 0" in rank["other_pairs"]["error"]


@pytest.mark.distributed
@pytest.mark.faults
def test_a_dead_rank_does_not_hang_the_other(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["codes"] == [0, 9]
    assert ranks[0]["died"].endswith("Error")


@pytest.mark.distributed
def test_rollouts_come_together_in_order(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["gathered"] == {
            "outputs": ["x0", "y", "x1", "y"], "groups": ["a", "b0", "a", "b1"], "rewards": [0.0, None, 1.0, None],
            "dropped": {"padding_row": 5}, "notes": ["n"], "step": 3,
        }  # fmt: skip


# --- the shares, without processes ----------------------------------------------------------------------------------


def random_pairs(rng: np.random.Generator) -> ScoringPairs:
    n, p = int(rng.integers(1, 30)), int(rng.integers(1, 9))
    contexts = tuple(rng.integers(0, 5, rng.integers(1, 60)) for _ in range(p))
    traces = tuple(rng.integers(0, 2, rng.integers(0, 4)) for _ in range(n))
    own, zero = rng.integers(0, p, n), np.zeros(n, dtype=np.int64)
    return ScoringPairs(
        contexts=contexts, traces=traces, own_N=own, group_N=own, multiplicity_P=np.ones(p, dtype=np.int64),
        rollout_N=zero, turn_N=zero,
    )  # fmt: skip


def test_shares_cover_every_wanted_cell_once_and_keep_equal_traces_together() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        pairs, world = random_pairs(rng), int(rng.integers(1, 12))
        wanted = rng.random((pairs.n_traces, pairs.n_contexts)) < rng.choice([0.2, 0.7, 1.0])
        masks = share_cells(pairs, world, wanted)
        assert len(masks) == world
        np.testing.assert_array_equal(np.sum(masks, axis=0), wanted.astype(int))
        for j in range(pairs.n_contexts):
            owner: dict[bytes, set[int]] = {}
            for rank, mask in enumerate(masks):
                for i in np.flatnonzero(mask[:, j]):
                    owner.setdefault(pairs.traces[i].astype(np.int64).tobytes(), set()).add(rank)
            assert all(len(who) == 1 for who in owner.values())


@pytest.mark.parametrize(("n_contexts", "context", "n_traces", "trace", "world"), [
    (16, 200, 64, 60, 4), (16, 200, 64, 60, 8), (8, 1000, 128, 60, 8), (4, 100, 64, 200, 16), (3, 50, 60, 50, 2),
])  # fmt: skip
def test_shares_are_even(n_contexts: int, context: int, n_traces: int, trace: int, world: int) -> None:
    rng = np.random.default_rng(0)
    own, zero = rng.integers(0, n_contexts, n_traces), np.zeros(n_traces, dtype=np.int64)
    pairs = ScoringPairs(
        contexts=tuple(rng.integers(0, 999, context) for _ in range(n_contexts)),
        traces=tuple(rng.integers(0, 999, trace) for _ in range(n_traces)),
        own_N=own, group_N=own, multiplicity_P=np.ones(n_contexts, dtype=np.int64), rollout_N=zero, turn_N=zero,
    )  # fmt: skip
    tokens = [
        sum(mask[:, j].sum() * trace + context for j in range(n_contexts) if mask[:, j].any())
        for mask in share_cells(pairs, world)
    ]
    whole = n_contexts * (n_traces * trace + context)
    assert max(tokens) <= 1.35 * whole / world
    assert max(tokens) <= 1.05 * np.mean(tokens)


def test_long_contexts_are_not_repeated_for_evenness() -> None:
    """Three contexts on two ranks: cutting the traces would be even, and run all three contexts twice."""
    rng = np.random.default_rng(0)
    own, zero = np.array([0, 0, 1, 1, 2, 2]), np.zeros(6, dtype=np.int64)
    pairs = ScoringPairs(
        contexts=tuple(rng.integers(0, 999, 1000) for _ in range(3)),
        traces=tuple(rng.integers(0, 999, 100) for _ in range(6)),
        own_N=own, group_N=own, multiplicity_P=np.ones(3, dtype=np.int64), rollout_N=zero, turn_N=zero,
    )  # fmt: skip
    columns = [set(np.flatnonzero(mask.any(axis=0)).tolist()) for mask in share_cells(pairs, 2)]
    assert sorted(map(len, columns)) == [1, 2]
    assert not columns[0] & columns[1]


def test_without_a_process_group_it_is_the_inner_scorer() -> None:
    pairs = some_pairs()
    inner = FunctionScorer(lambda batch: [-float(len(t)) for _, t in batch])
    np.testing.assert_array_equal(DistributedScorer(inner).score(pairs).logp_NP, inner.score(pairs).logp_NP)
    raise_together(None, None)
    with pytest.raises(Exception, match=r"rank 0 of 1 failed: ValueError: x"):
        raise_together(ValueError("x"), None)


def test_sharded_models_are_recognised() -> None:
    model = tiny_model()
    assert not is_sharded(model)
    assert not is_sharded(None)
    assert not is_sharded("model")
    next(model.parameters()).ds_id = 3  # as ZeRO-3 marks its parameters
    assert is_sharded(model)
