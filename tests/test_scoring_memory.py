"""Memory: what runs out is halved and gone on with, what is too large never exists, what is done is let go."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from collapsediag.errors import ScoringError
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring import head, hf, memory
from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.cache import Prefix
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.memory import MIN_TOKENS, is_out_of_memory, work_model
from collapsediag.scoring.short import pairs_of

from .scoring_tiny import draw, loop, make_model, mixed_pairs

TOLERANCE = 1e-8


@contextmanager
def forwards(model: Any, before: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `before(input_ids)` ahead of each forward of the model."""
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: before(kwargs["input_ids"]), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def out_of_memory_above(limit: int, error: BaseException | None = None) -> Callable[[torch.Tensor], None]:
    def check(ids: torch.Tensor) -> None:
        if ids.numel() > limit:
            raise error or torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {ids.numel()} GiB")

    return check


def short_pairs() -> ScoringPairs:
    """No pair longer than 40 tokens, 300 trace tokens in all."""
    rng = np.random.default_rng(2)
    contexts = [draw(rng, int(n)) for n in rng.integers(3, 14, 5)]
    traces = [draw(rng, int(n)) for n in rng.integers(5, 26, 20)]
    return pairs_of(contexts, traces, [i % 5 for i in range(20)])


@pytest.mark.fault(
    "out of memory in the scorer (CUDA, MPS, CPU)",
    "the token budget is halved and scoring goes on where it stopped; the scores are the same",
)
@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "mps", "python"],
)
@pytest.mark.parametrize("way", ["cascade", "masked", "plain"])
def test_halves_until_it_fits(way: str, error: BaseException | None, caplog: pytest.LogCaptureFixture) -> None:
    model, pairs = make_model(), short_pairs()
    scorer = HFScorer(model, attention=way)
    with caplog.at_level(logging.INFO, logger="collapsediag"), forwards(model, out_of_memory_above(50, error)):
        found = scorer.score(pairs).logp_NP
        again = scorer.score(pairs).logp_NP
    truth = loop(model, pairs.contexts, pairs.traces)
    np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(again, truth, rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.path == ("plain" if way == "plain" else "prefix")
    assert scorer.info.token_budget in (16, 32)
    lines = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    # The second call knows what fits.
    assert lines[0] == "out of memory at 2048 tokens a forward pass; going on with 1024."
    assert lines[-1].endswith(f"going on with {scorer.info.token_budget}.")
    assert len(lines) == int(np.log2(2048 / scorer.info.token_budget))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("way", ["cascade", "masked"])
def test_goes_on_where_it_stopped(way: str, tokens: bool) -> None:
    model = make_model()
    rng = np.random.default_rng(3)
    contexts = [draw(rng, 30) for _ in range(8)]
    traces = [draw(rng, 20) for _ in range(8)]
    pairs = pairs_of(contexts, traces, list(range(8)))
    ran: list[list[int]] = []
    prefills: list[int] = []  # contexts in the order in which they ran
    of_the_batch: list[int] = []
    broken_off: list[int] = []

    def fail_once(ids: torch.Tensor) -> None:
        flat = ids.flatten().tolist()
        found = [j for j, context in enumerate(contexts) if context[:9] in (flat[k : k + 9] for k in range(len(flat)))]
        if not found and len(set(prefills)) > 3 and not broken_off:
            broken_off.extend(of_the_batch)
            raise torch.OutOfMemoryError("out of memory")
        if found:
            of_the_batch.clear()
        of_the_batch.extend(found)
        prefills.extend(found)
        ran.append(flat)

    scorer = HFScorer(model, attention=way, token_budget=64, check_every=0)
    told: list[tuple[int, int]] = []
    with forwards(model, fail_once):
        if tokens:
            scores = scorer.score_tokens(pairs, entropies=True, progress=lambda a, b: told.append((a, b)))
            found = scores.matrix.logp_NP
            assert [v.sum() for v in scores.own_logp] == pytest.approx(found.diagonal().tolist(), abs=1e-12)
        else:
            found = scorer.score(pairs, progress=lambda a, b: told.append((a, b))).logp_NP
    np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=TOLERANCE)
    # Contexts of finished batches ran once; those of the batch that was broken off ran again.
    assert 1 <= len(broken_off) <= 4
    assert [prefills.count(j) for j in range(8)] == [1 + (j in broken_off) for j in range(8)]
    done = [a for a, _ in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1] == sum(map(len, ran))


@pytest.mark.parametrize("way", ["auto", "masked", "plain"])
def test_gives_up_with_the_size(way: str) -> None:
    model = make_model()
    scorer = HFScorer(model, attention=way)
    with (
        forwards(model, out_of_memory_above(0)),
        pytest.raises(ScoringError, match=rf"out of memory on cpu even at {MIN_TOKENS} tokens .*Tried to allocate"),
    ):
        scorer.score(mixed_pairs())


@pytest.mark.parametrize("check_every", [0, 1])
def test_a_pair_too_long_for_the_plain_path_is_scored_in_pieces(check_every: int) -> None:
    """The fast path cuts long pairs; the self-check, which forwards them in full, must not end the work."""
    model = make_model()
    rng = np.random.default_rng(4)
    contexts, traces = [draw(rng, 200), draw(rng, 5)], [draw(rng, 100), draw(rng, 6)]
    scorer = HFScorer(model, check_every=check_every)
    with forwards(model, out_of_memory_above(40)):
        found = scorer.score(pairs_of(contexts, traces, [0, 1])).logp_NP
    np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.path == "prefix"


def test_what_a_failed_pass_held_is_free_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    known = {id(o) for o in gc.get_objects() if isinstance(o, Prefix)}
    at_failure: list[int] = []
    after_it: list[int] = []

    def prefixes() -> int:
        # No gc.collect(): on a GPU nobody would call it either.
        return sum(isinstance(o, Prefix) and bool(o.segments) and id(o) not in known for o in gc.get_objects())

    def fail(ids: torch.Tensor) -> None:
        if ids.numel() > 80:
            at_failure.append(prefixes())
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(hf, "release_memory", lambda device: after_it.append(prefixes()))
    with forwards(model, fail):
        HFScorer(model, check_every=0).score(short_pairs())
    assert max(at_failure) > 0, "nothing was held when memory ran out; this tests nothing"
    assert after_it == [0] * len(at_failure)


class LargestLogits(TorchDispatchMode):
    """The most rows of any tensor whose last dimension is the vocabulary, weights left out."""

    def __init__(self, vocabulary: int, weights: set[int]):
        super().__init__()
        self.vocabulary, self.weights, self.rows, self.seen = vocabulary, weights, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if not isinstance(tensor, torch.Tensor) or not tensor.dim() or tensor.shape[-1] != self.vocabulary:
                continue
            if tensor.untyped_storage().data_ptr() not in self.weights:
                self.seen += 1
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


def largest_logits(model: Any, run: Callable[[], Any]) -> LargestLogits:
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with LargestLogits(model.config.vocab_size, weights) as spy:
        run()
    return spy


@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("way", ["cascade", "masked", "plain"])
def test_logits_of_all_tokens_never_exist(way: str, entropies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check included."""
    vocabulary, rows = 601, 17
    model = make_model(vocab_size=vocabulary, dtype=torch.float32)
    monkeypatch.setattr(head, "CPU_LOGITS_BYTES", 4 * vocabulary * rows)
    rng = np.random.default_rng(5)
    contexts, traces = [draw(rng, 30) for _ in range(6)], [draw(rng, 25) for _ in range(12)]
    pairs = pairs_of(contexts, traces, [i % 6 for i in range(12)])
    scorer = HFScorer(model, attention=way, check_every=1)
    spy = largest_logits(model, lambda: scorer.score_tokens(pairs, entropies=entropies))
    assert scorer.info is not None
    assert scorer.info.path == ("plain" if way == "plain" else "prefix")
    assert (scorer.info.check is None) == (way == "plain")
    assert spy.seen > 6 * 12 * 25 / rows, "the spy saw too few logits to have seen them all"
    assert 0 < spy.rows <= rows
    # The naive forward, for comparison: the spy does see them.
    with torch.no_grad():
        ids = torch.tensor([contexts[0] + traces[0]])
        assert largest_logits(model, lambda: model(input_ids=ids)).rows == 55


@pytest.mark.parametrize("vocabulary", [50, 5_000, 300_000])
def test_a_chunk_of_logits_fits_its_bytes(vocabulary: int) -> None:
    weight = torch.nn.Linear(4, vocabulary, device="meta")
    tap = object.__new__(head.HeadTap)
    tap.head, tap.max_rows = weight, None
    rows = tap._rows_per_chunk(torch.zeros(1, 1, 4))
    assert 16 <= rows <= head.MAX_ROWS
    assert rows == 16 or rows * vocabulary * 4 <= head.CPU_LOGITS_BYTES


def test_the_plain_path_without_a_known_head_keeps_logits_of_the_traces_only() -> None:
    vocabulary = 601
    model = make_model(vocab_size=vocabulary, dtype=torch.float32)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)  # what no config tells of
    rng = np.random.default_rng(6)
    contexts, traces = [draw(rng, 90) for _ in range(4)], [draw(rng, 10) for _ in range(6)]
    pairs = pairs_of(contexts, traces, [i % 4 for i in range(6)])
    spy = largest_logits(model, lambda: HFScorer(model, attention="plain", token_budget=128).score(pairs))
    # Two pairs of 100 tokens fit twice the budget; 11 positions of each are read.
    assert spy.rows <= 2 * 11


def test_a_budget_bounds_every_forward_of_the_fast_path() -> None:
    model, pairs = make_model(), mixed_pairs()
    for budget in (16, 24, 100):
        sizes: list[int] = []
        with forwards(model, lambda ids, sizes=sizes: sizes.append(ids.numel())):
            HFScorer(model, token_budget=budget, check_every=0).score(pairs)
        assert 0 < max(sizes) <= budget


def test_a_halved_budget_grows_back_and_waits_longer_after_each_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "GROW_AFTER", 2)
    model = make_model()
    contexts, traces = [draw(np.random.default_rng(7), 5)], [draw(np.random.default_rng(8), 50)]
    truth = loop(model, contexts, traces)
    scorer = HFScorer(model, token_budget=64, check_every=0)
    call, ran_out, budgets = 0, [], []

    def run_out(ids: torch.Tensor) -> None:
        if call < 7 and ids.numel() > 40:  # from then on what took the memory is gone
            ran_out.append(call)
            raise torch.OutOfMemoryError("out of memory")

    with forwards(model, run_out):
        for call in range(16):  # noqa: B007 (read by run_out)
            found = scorer.score(pairs_of(contexts, traces, [0])).logp_NP
            np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)
            assert scorer.info is not None
            budgets.append(scorer.info.token_budget)
    # After 2 calls that fitted, then after 4, then after 8.
    assert ran_out == [0, 2, 6]
    assert budgets == [32] * 14 + [64] * 2


def test_memory_runs_out_in_many_words() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_budget_shrinks_by_halves_down_to_the_least() -> None:
    access = ModelAccess.of(make_model())
    sizes = [work_model(access, 100, None, shrink=shrink).max_tokens for shrink in (1, 2, 4, 1 << 20)]
    assert sizes == [2048, 1024, 512, MIN_TOKENS]
    held = [work_model(access, 100, 64, shrink=shrink).max_context_tokens for shrink in (1, 2)]
    assert held[0] // 2 == held[1]
    assert work_model(access, 100, 64, shrink=1 << 60).max_context_tokens == 1
