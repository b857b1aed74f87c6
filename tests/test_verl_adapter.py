"""The parts of the veRL adapter that need no veRL: settings, call plans, rows, dumps, the dormant plug-in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.integrations.verl.__main__ import checked, with_our_overrides
from collapsediag.integrations.verl.dump import dump
from collapsediag.integrations.verl.facts import ModelFacts as Facts
from collapsediag.integrations.verl.facts import lasting_notes, lasting_refusal, limits_of, staleness_note
from collapsediag.integrations.verl.plugin import TrainerImports
from collapsediag.integrations.verl.rows import Row, batch_of, read_rows
from collapsediag.integrations.verl.scorer import Limits, WorkerScorer, check_rows, laid_out, last_line
from collapsediag.integrations.verl.settings import VerlSettings, settings_of
from collapsediag.pairs import ScoringPairs, build_pairs
from collapsediag.readers import read_rollouts

LIMITS = Limits(temperature=0.7, row_tokens=12, micro_batch_tokens=24, vocabulary=50)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"evry": 5}, "collapsediag.evry is no setting; did you mean every?"),
        ({"every": "five"}, "collapsediag.every='five': a whole number is needed"),
        ({"every": True}, "collapsediag.every=True: a whole number is needed"),
        ({"every": 0}, "every=0"),
        ({"logged": "some"}, "collapsediag.logged='some': choose one of charts, all, none"),
        ({"definition": "mine"}, "collapsediag.definition='mine'"),
        ({"reasoning": "thought"}, "reasoning must be"),
        ({"max_traces": 0}, "max_traces must be a whole number from 1 on"),
        ({"token_budget": 0}, "collapsediag.token_budget=0"),
        ({"context_bank": -1}, "collapsediag.context_bank=-1"),
        ({"dump": True}, "collapsediag.dump=true needs collapsediag.out=FOLDER"),
        (5, "collapsediag=5: a section is needed"),
    ],
)
def test_a_wrong_setting_is_named(section: Any, said: str) -> None:
    with pytest.raises(SettingsError) as found:
        settings_of({"collapsediag": section})
    assert said in str(found.value)


def test_settings_come_from_the_config_and_changes_win() -> None:
    settings = settings_of({"collapsediag": {"every": 5, "success_threshold": 1}}, every=2, max_contexts=8)
    assert (settings.every, settings.success_threshold, settings.max_contexts) == (2, 1, 8)
    assert settings_of({}) == VerlSettings()


def test_the_front_door_ends_with_one_line_before_anything_runs() -> None:
    ran: list[Any] = []
    run = checked(lambda config, **kwargs: ran.append((config, kwargs)))
    with pytest.raises(SystemExit, match=r"error: collapsediag\.evry is no setting"):
        run({"collapsediag": {"evry": 5}})
    assert ran == []
    run({"collapsediag": {"every": 5}}, task_runner_class="T")
    assert ran == [({"collapsediag": {"every": 5}}, {"task_runner_class": "T"})]


def test_the_front_door_switches_diagnostics_on() -> None:
    assert with_our_overrides(["a=1"])[-1] == "+collapsediag.every=10"
    assert not any("every=10" in argument for argument in with_our_overrides(["a=1", "+collapsediag.seed=1"]))


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


def test_the_order_of_rows_is_that_of_token_numbers() -> None:
    ids = [[300, 1], [2], [300], [1, 70000], [256]]
    ordered = sorted((row(prompt=np.array(p)) for p in ids), key=lambda r: r.sort_key)
    assert [r.prompt.tolist() for r in ordered] == sorted(ids)


# -- what the config says --------------------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    from collapsediag.integrations.verl import facts

    assert facts
    rollout = {"temperature": 1.0, "log_prob_micro_batch_size_per_gpu": 4, "response_length": 24, "prompt_length": 64}
    made = {
        "algorithm": changes.pop("algorithm", {}),
        "data": {"max_prompt_length": 1, "max_response_length": 1},
        "actor_rollout_ref": {"actor": changes.pop("actor", {}), "rollout": rollout | changes, "model": {}},
    }
    return Section(made)


class Section(dict):  # type: ignore[type-arg]
    """As OmegaConf: attributes and keys."""

    def __getattr__(self, name: str) -> Any:
        value = self[name]
        return Section(value) if isinstance(value, dict) else value


def test_limits_are_those_of_the_trainers_own_pass() -> None:
    fixed = limits_of(config(), Facts(vocabulary=9))
    assert (fixed.row_tokens, fixed.micro_batch_tokens, fixed.vocabulary) == (352, 352, 9)
    dynamic = {"log_prob_use_dynamic_bsz": True, "log_prob_max_token_len_per_gpu": 200}
    assert limits_of(config(**dynamic), Facts()).row_tokens == 200
    assert limits_of(config(**dynamic), Facts(positions=100)).row_tokens == 100
    # A limit of the model that training itself oversteps is none.
    assert limits_of(config(**dynamic), Facts(positions=10)).row_tokens == 88


def test_refusals_and_notes() -> None:
    assert lasting_refusal(config()) is None
    assert lasting_refusal(config(actor={"megatron": {"router_replay": {"mode": "R3"}}})) == "router_replay"
    assert lasting_refusal(config(actor={"veomni": {"router_replay": {"mode": "disabled"}}})) is None
    assert lasting_notes(config()) == []
    told = lasting_notes(
        config(
            temperature=0.7,
            algorithm={"rollout_correction": {"bypass_mode": True}, "filter_groups": {"enable": True}},
        )
    )
    assert [note.split(" ")[0] for note in told] == ["log-likelihoods", "old_log_probs", "groups"]
    assert staleness_note([row(weights_from=4)], step=5) is None
    note = staleness_note([row(weights_from=4), row(weights_from=2)], step=5)
    assert note is not None
    assert note.startswith("1 of 2 rollouts were written by weights up to 2 steps older")


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


# -- the plug-in -----------------------------------------------------------------------------------------------------


def test_the_plug_in_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import collapsediag.integrations.verl.plugin\n"
        "print(sorted(n for n in set(sys.modules) - before if n.split('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = ["", ".integrations", ".integrations.verl", ".integrations.verl.plugin"]
    assert done.stdout.strip() == str([f"collapsediag{name}" for name in names])


def test_a_module_is_seen_once_after_it_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "watched_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("answer = 42")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    names = {"watched_package.inner", "watched_package.missing"}
    monkeypatch.setattr(sys, "meta_path", [TrainerImports(names, lambda m: seen.append(m.answer)), *sys.meta_path])
    import watched_package.other  # type: ignore[import-not-found]

    assert seen == []
    import watched_package.inner  # type: ignore[import-not-found]

    assert seen == [42]
    with pytest.raises(ModuleNotFoundError):
        import watched_package.missing  # type: ignore[import-not-found]  # noqa: F401
    assert seen == [42]


def test_a_trainer_that_cannot_be_observed_is_refused() -> None:
    from collapsediag.integrations.verl import attach

    with pytest.raises(SettingsError, match="SimpleNamespace has no actor_rollout_wg"):
        attach(SimpleNamespace(config={}, tokenizer=1, _update_actor=print))
