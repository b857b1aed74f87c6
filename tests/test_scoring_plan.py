"""The plan, integers only: every token of every trace is predicted once, from the right place, within the budget."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collapsediag.scoring.contexts import plan_bases, plan_batches
from collapsediag.scoring.cost import CostEstimate, estimate, estimate_cost, floor_of
from collapsediag.scoring.packing import Step, pack_traces, trie_size, unique_sequences
from collapsediag.scoring.plan import Unique, make_plan
from collapsediag.scoring.shape import WorkModel, choose_shape

IntArray = NDArray[np.int64]


def array(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


# Few letters and a stem that many share: prefixes, duplicates and one-token traces occur all the time.
words = st.lists(st.integers(0, 2), min_size=1, max_size=12)
stems = st.sampled_from([[], [0] * 40, [1, 2] * 30])
sequences = st.builds(lambda stem, word: array(stem + word), stems, words)
trace_sets = st.lists(sequences, min_size=1, max_size=12)


def path_of(step: Step, node: int) -> list[int]:
    """Nodes that `node` sees, from the mask rule alone."""
    return [k for k in range(node + 1) if node < step.end_T[k]]


def tokens_before(steps: list[Step], number: int, node: int) -> list[int]:
    """Trace tokens that a node sees, its own included: those of its step and of all steps that this one continues."""
    step = steps[number]
    own = [int(step.token_T[k]) for k in path_of(step, node)]
    if step.parent < 0:
        return own
    parent = steps[step.parent]
    return tokens_before(steps, step.parent, parent.n_tokens - 1) + own


@given(trace_sets, st.sampled_from([1, 3, 8, 17, 64, 1000]))
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_once_from_exactly_its_own_past(traces: list[IntArray], budget: int) -> None:
    unique, _ = unique_sequences(traces)
    steps = pack_traces(unique, budget)
    seen: set[tuple[int, int]] = set()
    for number, step in enumerate(steps):
        assert 0 < step.n_tokens <= budget
        assert step.parent < number
        assert step.parent < 0 or steps[step.parent].keep
        assert (np.diff(step.pair_row_M) >= 0).all()
        for pair, trace, time in zip(step.entry_pair_K, step.entry_trace_K, step.entry_time_K, strict=True):
            node = int(step.row_R[step.pair_row_M[pair]])
            assert step.pair_target_M[pair] == unique[trace][time]
            assert tokens_before(steps, number, node) == unique[trace][:time].tolist()
            assert step.depth_T[node] == time - 1
            assert (trace, time) not in seen
            seen.add((int(trace), int(time)))
    # Position 0 is predicted by the context; all others by a node.
    assert seen == {(u, t) for u, trace in enumerate(unique) for t in range(1, trace.size)}


@given(trace_sets)
@settings(max_examples=50, deadline=None)
def test_with_room_for_all_the_steps_are_the_trie(traces: list[IntArray]) -> None:
    unique, _ = unique_sequences(traces)
    prefixes = {tuple(t[:n].tolist()) for t in unique for n in range(1, t.size)}
    steps = pack_traces(unique, 10_000)
    assert sum(step.n_tokens for step in steps) == len(prefixes) == trie_size([t[:-1] for t in unique])
    assert len(steps) <= 1


def test_a_shared_stretch_runs_once_even_where_the_budget_is_small() -> None:
    stem = np.arange(100)
    traces, _ = unique_sequences([np.concatenate([stem, array([k] * 20)]) for k in range(10)])
    steps = pack_traces(traces, 64)
    assert sum(step.n_tokens for step in steps) == 100 + 10 * 19
    assert sum(step.keep for step in steps) == 2  # the stem, in two pieces


def test_subtrees_are_not_torn_apart() -> None:
    rng = np.random.default_rng(0)
    templates = [rng.integers(0, 1000, 48) for _ in range(3)]
    traces, _ = unique_sequences([np.concatenate([t, rng.integers(0, 1000, 10)]) for t in templates for _ in range(8)])
    assert sum(s.n_tokens for s in pack_traces(traces, 192)) == trie_size([t[:-1] for t in traces])


def test_a_long_trace_is_cut_and_continued() -> None:
    steps = pack_traces([np.arange(1000)], 128)
    assert [step.n_tokens for step in steps] == [128] * 7 + [103]
    assert [step.parent for step in steps] == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert [step.keep for step in steps] == [True] * 7 + [False]


def test_nested_prefixes_do_not_exhaust_the_recursion() -> None:
    traces, _ = unique_sequences([np.zeros(n, dtype=np.int64) for n in range(1, 1100)])
    steps = pack_traces(traces, 64)
    assert sum(step.entry_time_K.size for step in steps) == sum(t.size - 1 for t in traces)


@given(st.lists(sequences, min_size=1, max_size=10), st.sampled_from([1, 2, 5]), st.sampled_from([16, 100, 10_000]))
@settings(max_examples=100, deadline=None)
def test_bases_and_batches_spell_every_context(contexts: list[IntArray], rows: int, budget: int) -> None:
    unique, _ = unique_sequences(contexts)
    bases, base_of = plan_bases(unique)

    def spelled(base: int) -> list[int]:
        return [] if base < 0 else spelled(bases[base].parent) + bases[base].tokens.tolist()

    for number, base in enumerate(bases):
        assert base.parent < number
        assert base.start == len(spelled(base.parent))
    for context, base in zip(unique, base_of, strict=True):
        start = spelled(base)
        assert context[: len(start)].tolist() == start
        assert len(start) < context.size, "the last token of a context must run for each context"
    batches = plan_batches(unique, bases, base_of, rows, budget)
    assert sorted(c for b in batches for c in b.contexts) == list(range(len(unique)))
    for batch in batches:
        assert len(batch.contexts) <= rows
        assert [row for prefill in batch.prefills for row in prefill] == list(range(len(batch.contexts)))
        assert batch.bases == tuple(base_of[c] for c in batch.contexts)
        for prefill in batch.prefills:
            assert len({batch.bases[row] for row in prefill}) == 1
            longest = max(unique[batch.contexts[row]].size for row in prefill) - len(spelled(batch.bases[prefill[0]]))
            assert len(prefill) == 1 or longest * len(prefill) <= budget


def test_contexts_share_a_tree_of_beginnings() -> None:
    system, task_a, task_b = np.arange(100), 200 + np.arange(50), 300 + np.arange(50)
    contexts = [np.concatenate([system, task, array([k] * 10)]) for task in (task_a, task_b) for k in range(3)]
    bases, _ = plan_bases(unique_sequences(contexts)[0])
    assert sorted(b.tokens.size for b in bases) == [50, 50, 100]
    assert sum(b.tokens.size for b in bases) + 6 * 10 == floor_of(contexts, [array([1])])[0]


def test_cells_that_want_the_same_traces_run_together_and_no_other_cell_runs() -> None:
    rng = np.random.default_rng(1)
    contexts = [rng.integers(0, 50, 6) for _ in range(6)]
    traces = [rng.integers(0, 50, 5) for _ in range(8)] + [array([])]
    scored = rng.random((9, 6)) < 0.4
    scored[:, 1] = scored[:, 4]
    scored[:, 2] = False
    unique = Unique.of(contexts, traces, scored)
    groups = make_plan(unique, WorkModel()).groups
    ran = np.zeros_like(unique.wanted_UC)
    for group in groups:
        assert not ran[np.ix_(group.trace_G, group.context_G)].any()
        ran[np.ix_(group.trace_G, group.context_G)] = True
    np.testing.assert_array_equal(ran, unique.wanted_UC)
    assert unique.wanted_UC.sum() == scored[:8].sum()
    together = {int(unique.context_of_P[1]), int(unique.context_of_P[4])}
    assert any(together <= set(group.context_G.tolist()) for group in groups)


def test_finished_contexts_are_left_out() -> None:
    unique = Unique.of([array([k]) for k in range(4)], [array([7, 8])])
    groups = make_plan(unique, WorkModel(), np.array([[False, True, False, True]])).groups
    assert [g.context_G.tolist() for g in groups] == [[1, 3]]


def test_groups_share_the_beginnings_of_their_contexts() -> None:
    """As in budget mode, where each context has traces of its own."""
    stem = np.arange(100)
    contexts = [np.concatenate([stem, array([200 + k] * 5)]) for k in range(4)]
    traces = [array([k, k, k]) for k in range(4)]
    cost = estimate_cost(contexts, traces, scored_NP=np.eye(4, dtype=bool))
    assert cost.tokens == cost.floor_tokens == 100 + 4 * 5 + 4 * 2


def test_cost_counts_by_hand() -> None:
    # Two contexts share 40 of 42 tokens; three traces, two of them equal, the third shares its first two tokens.
    stem = list(range(40))
    contexts = [array([*stem, 50, 51]), array([*stem, 60, 61])]
    traces = [array([1, 2, 3]), array([1, 2, 3]), array([1, 2, 9, 9]), array([])]
    cost = estimate_cost(contexts, traces)
    assert cost.pairs == 6
    assert cost.naive_tokens == 2 * (45 + 45 + 46)
    assert cost.floor_tokens == 44 + 2 * 3
    assert cost.floor_rows == 2 * 4
    assert (cost.tokens, cost.logit_rows) == (50, 8)
    assert "6 pairs: 50 tokens" in cost.describe()


def prefixes(sequence: IntArray) -> set[tuple[int, ...]]:
    """All non-empty beginnings of a sequence."""
    return {tuple(sequence[:n].tolist()) for n in range(1, sequence.size + 1)}


@given(st.lists(sequences, min_size=1, max_size=5), trace_sets, st.sampled_from([1, 8, 64, 1000]), st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_floor_is_the_set_of_what_must_be_known(
    contexts: list[IntArray], traces: list[IntArray], budget: int, random: Any
) -> None:
    """A set of (context, beginning of a trace) pairs cannot count a shared node twice, nor forget one."""
    contexts, traces = [*contexts, contexts[0]], [*traces, traces[0], array([])]
    whole = [[True] * len(contexts) for _ in traces]
    some = [[random.random() < 0.5 for _ in contexts] for _ in traces]
    for scored in (whole, some):
        wanted = {
            (tuple(contexts[j].tolist()), tuple(traces[i].tolist()))
            for i, row in enumerate(scored)
            for j, here in enumerate(row)
            if here and traces[i].size
        }
        read = {(x, p) for x, z in wanted for p in prefixes(array(list(z))[:-1])}
        rows = {(x, p) for x, z in wanted for p in [(), *prefixes(array(list(z))[:-1])]}
        heads = set().union(*(prefixes(array(list(x))) for x, _ in wanted))
        work = WorkModel(max_tokens=budget)
        cost = estimate_cost(contexts, traces, scored_NP=np.array(scored), work=work)
        assert (cost.floor_tokens, cost.floor_rows) == (len(heads) + len(read), len(rows))
        assert cost.naive_tokens == sum(
            contexts[j].size + traces[i].size
            for i, row in enumerate(scored)
            for j, here in enumerate(row)
            if here and traces[i].size
        )
        # What runs covers what must, and each pass holds no node twice.
        unique = Unique.of(contexts, traces, np.array(scored))
        ran = 0
        for group in make_plan(unique, work).groups:
            steps = list(group.steps)
            ran += group.context_G.size * sum(step.n_tokens for step in steps)
            for number, step in enumerate(steps):
                paths = {tuple(tokens_before(steps, number, node)) for node in range(step.n_tokens)}
                assert len(paths) == step.n_tokens
        assert len(read) <= ran <= sum(len(z) - 1 for _, z in wanted)
        assert cost.tokens >= len(heads) + len(read)


def test_cost_of_some_cells() -> None:
    contexts, traces = [array([1, 2]), array([3])], [array([5, 6]), array([7])]
    cost = estimate_cost(contexts, traces, scored_NP=np.array([[True, False], [False, True]]))
    assert (cost.pairs, cost.naive_tokens, cost.tokens) == (2, 4 + 2, 3 + 1)


def test_padding_of_contexts_is_counted() -> None:
    unique = Unique.of([array([1, 2, 3]), array([4])], [array([5])])
    assert estimate(unique, make_plan(unique, WorkModel())).tokens == 6
    assert floor_of(unique.contexts, unique.traces) == (4, 2)


@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        ({"linear": 1.0, "per_key": 0.0, "per_forward": 1e9}, "long"),
        ({"linear": 1.0, "per_key": 1.0}, "short"),
    ],
)
def test_the_work_model_decides_the_chunk(work: dict[str, Any], wanted: str) -> None:
    rng = np.random.default_rng(0)
    traces, _ = unique_sequences([rng.integers(0, 1000, 50) for _ in range(40)])
    n_contexts = 1 if wanted == "long" else 16
    steps, rows = choose_shape([np.arange(10)] * n_contexts, traces, WorkModel(max_tokens=1024, **work))
    longest = max(step.n_tokens for step in steps)
    if wanted == "long":
        assert (longest > 900, rows) == (True, 1)
    else:
        assert (longest < 70, rows >= 8) == (True, True)


def test_few_contexts_are_held_where_memory_is_short() -> None:
    _, rows = choose_shape([np.arange(100)] * 16, [array([1, 2])], WorkModel(max_context_tokens=350))
    assert rows == 3


def test_planning_needs_no_torch() -> None:
    code = "import sys, collapsediag.scoring.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_description_of_nothing() -> None:
    cost = CostEstimate(pairs=0, tokens=0, logit_rows=0, naive_tokens=0, floor_tokens=0, floor_rows=0)
    assert cost.describe().startswith("0 pairs: 0 tokens")


@pytest.mark.parametrize(("linear", "per_key"), [(1e8, 5e4), (2e5, 512.0), (1.0, 1.0), (1.0, 0.0)])
def test_trees_are_joined_where_it_saves_more_than_the_others_keys_cost(linear: float, per_key: float) -> None:
    """Against the costs of both ways, counted out; equal costs count as not paying."""
    length = 100
    work = WorkModel(linear=linear, per_key=per_key, own_trees_only=True, max_tokens=4096)
    for shared in range(1, length - 1):
        stem = np.arange(shared)
        traces = [np.concatenate([stem, np.full(length - shared, 500 + k)]) for k in range(2)]
        steps, _ = choose_shape([np.arange(50)], traces, work)
        inputs = length - 1  # the last token is not run
        apart = 2 * inputs * linear + 2 * inputs**2 * per_key
        joined = (2 * inputs - shared) * linear + (2 * inputs - shared) ** 2 * per_key
        assert sum(step.n_tokens for step in steps) in (2 * inputs, 2 * inputs - shared)
        if abs(apart - joined) > 0.01 * apart:
            assert (sum(step.n_tokens for step in steps) < 2 * inputs) == (joined < apart), shared


def test_masked_attention_shares_whatever_is_shared() -> None:
    traces = [np.array([1, 2, 3, 4]), np.array([1, 5, 6, 7])]
    work = WorkModel(linear=1.0, per_key=1.0, own_trees_only=False, max_tokens=64)
    steps, _ = choose_shape([np.arange(50)], traces, work)
    assert sum(step.n_tokens for step in steps) == 5
