from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
import_or_skip("transformers")

import collapsediag as cd  # noqa: E402
from collapsediag.cli import main  # noqa: E402
from collapsediag.cli.demo_show import one_thread  # noqa: E402
from collapsediag.demo import SCENARIOS, DemoTraining, TrainingSettings, task  # noqa: E402
from collapsediag.demo.policy import output_logits  # noqa: E402
from collapsediag.demo.training import _mask, group_advantages  # noqa: E402
from collapsediag.run_folder import read_records  # noqa: E402

KEY = "collapse_first_turn_sample/"
TINY = TrainingSettings(steps=2, n_prompts=3, group_size=4, warm_up_steps=5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def ids(words: str) -> list[int]:
    return [task.IDS[word] for word in words.split()]


def watched(settings: TrainingSettings, every: int) -> list[cd.Record]:
    training = DemoTraining(settings)
    monitor = cd.Monitor(
        cd.HFScorer(training.policy),
        every=every,
        tokenizer=training.tokenizer,
        reasoning="think",
        pairs=cd.PairSettings(max_traces=64),
        on_error="raise",
    )
    return [monitor.observe(step, batch) for step, batch in training.steps()]


def series(records: list[cd.Record], name: str) -> list[float]:
    return [r.values[name] for r in records if name in r.values]


@pytest.mark.parametrize(
    ("output", "valid", "reasoning"),
    [
        ("<think> so see red next find gold </think> <answer> up </answer> <eos>", True, 6),
        ("<think> so see red next find gold </think> <answer> up </answer>", False, 6),
        ("<think> so see red next find gold </think> <answer> red </answer> <eos>", False, 6),
        ("<think> see red next </think> <answer> up </answer> <eos>", False, 3),
        ("<think> so see red next find gold so </think> <answer> up up </answer> <eos>", False, 7),
        ("<think> so see <answer> next find gold </think> <answer> up </answer> <eos>", False, 6),
        ("so see red next find gold </think> <answer> up </answer> <eos>", False, None),
        ("<think> so see red next find gold", False, None),
    ],
)
def test_parsing(output: str, valid: bool, reasoning: int | None) -> None:
    parsed = task.parse(ids(output))
    assert parsed.valid is valid
    assert (None if parsed.reasoning is None else len(parsed.reasoning)) == reasoning
    assert parsed.door == (task.DOORS.index("up") if valid else None)


def test_demonstrations_have_the_format_and_name_their_colours() -> None:
    rng = np.random.default_rng(0)
    right = 0
    for prompt in (p for _ in range(40) for p in task.draw_prompts(rng, 8)):
        assert len(prompt.ids) == task.PROMPT_LENGTH
        shown = [task.WORDS[i] for i in prompt.ids if task.WORDS[i] in task.COLOURS]
        assert shown == [task.COLOURS[c] for c in prompt.shown]
        parsed = task.parse(task.demonstration(rng, prompt.shown))
        assert parsed.valid
        right += task.solves_readable(parsed, prompt)
    # Half of the doors are right, and one in eight of the others by chance: 0.5625 of 320.
    assert abs(right / 320 - 0.5625) < 0.1


def test_the_hard_door_cannot_be_read_off_the_colours() -> None:
    rng = np.random.default_rng(0)
    doors = set()
    for _ in range(40):
        prompt = task.draw_prompt(rng, (1, 2, 3))
        solved = [d for d in range(8) if task.solves_hard(task.Parsed(True, (), d), prompt)]
        assert len(solved) == 1
        doors.update(solved)
    assert len(doors) >= 5


def test_group_advantages_are_the_normalised_rewards() -> None:
    reward = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    expected = (np.array([1.0, 0, 0, 1]) - 0.5) / np.std([1.0, 0, 0, 1], ddof=1)
    np.testing.assert_allclose(group_advantages(reward)[0].numpy(), expected, rtol=1e-5)
    np.testing.assert_array_equal(group_advantages(reward)[1].numpy(), np.zeros(4))


@pytest.mark.parametrize("bonus", [0.0, 0.7])
def test_the_update_follows_the_policy_gradient(bonus: float) -> None:
    """The gradient left by an update points where a loop over single tokens, in float64, says."""
    settings = dataclasses.replace(TINY, entropy_bonus=bonus, lr=0.0)
    training = DemoTraining(settings)
    prompts = task.draw_prompts(np.random.default_rng(3), 3)
    prompt = torch.tensor([p.ids for p in prompts]).repeat_interleave(4, dim=0)
    output = torch.randint(len(task.WORDS), (12, 9), generator=torch.Generator().manual_seed(0))
    output[::2, 5:] = 0
    rewards = [float(i % 3) for i in range(12)]
    training._rewards = lambda *_: [(r, False) for r in rewards]  # type: ignore[method-assign]
    training._update(prompts, prompt, output)
    found = {name: p.grad.double() for name, p in training.policy.named_parameters() if p.grad is not None}

    policy = training.policy.double()
    loss, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in range(12):
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
        advantage = (rewards[row] - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        written = output[row].tolist()
        written = written[: written.index(0) + 1] if 0 in written else written
        for t, token in enumerate(written):
            context = torch.tensor([[*prompt[row].tolist(), *written[:t]]])
            logp = policy(input_ids=context).logits[0, -1].log_softmax(-1)
            loss = loss - advantage * logp[token] - bonus * -(logp.exp() * logp).sum()
            tokens += 1
    policy.zero_grad()
    (loss / tokens).backward()
    expected = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    a = torch.cat([found[name].flatten() for name in expected])
    b = torch.cat([g.flatten() for g in expected.values()])
    # Clipping rescales the gradient; its direction is what counts.
    np.testing.assert_allclose(float(a @ b / (a.norm() * b.norm())), 1.0, atol=1e-6)


def test_the_mask_ends_with_the_first_end_token() -> None:
    np.testing.assert_array_equal(
        _mask(torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8], [0, 0, 0, 0]])).numpy(),
        [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    )


def test_the_batch_says_what_the_policy_did() -> None:
    training = DemoTraining(TINY)
    step, batch = next(training.steps())
    assert (step, len(batch), len(batch.groups())) == (0, 12, 3)
    turn = batch.rollouts[0].turns[0]
    assert turn.context_ids is not None
    assert turn.output_ids is not None
    whole = torch.tensor([[*turn.context_ids.tolist(), *turn.output_ids.tolist()]])
    with torch.no_grad():
        logp = output_logits(training.policy, whole)[0].log_softmax(-1)
    np.testing.assert_allclose(turn.logprobs, [float(logp[t, i]) for t, i in enumerate(turn.output_ids)], atol=1e-5)
    np.testing.assert_allclose(turn.entropies, -(logp.exp() * logp).sum(-1).numpy(), atol=1e-5)
    assert turn.output == training.tokenizer.decode([i for i in turn.output_ids.tolist() if i != 0])


def test_the_same_seed_gives_the_same_run_and_no_global_generator_moves() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index, union-attr]
    runs: list[list[dict[str, Any]]] = []
    for seed in (0, 0, 1):
        records = watched(dataclasses.replace(TINY, seed=seed), every=1)
        runs.append([{k: v for k, v in r.values.items() if not k.startswith("timing_s/")} for r in records])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index, union-attr]


def test_watching_does_not_change_the_training() -> None:
    weights = []
    for watch in (True, False):
        training = DemoTraining(TINY)
        monitor = cd.Monitor(cd.HFScorer(training.policy), every=1, tokenizer=training.tokenizer, on_error="raise")
        for step, batch in training.steps():
            if watch:
                monitor.observe(step, batch)
        weights.append(training.policy.state_dict())
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value.numpy(), weights[1][name].numpy())


def test_template_collapse_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, for as long as the fastest of the seeds needs."""
    out = tmp_path / "run"
    assert main(["demo", "--seed", "1", "--steps", "20", "--out", str(out)]) == 0
    records = read_records(out)
    accuracy = series(records, KEY + "retrieval_accuracy")
    assert accuracy[0] > 0.95
    assert accuracy[-1] < 0.25
    entropy = series(records, KEY + "conditional_entropy_est")
    assert min(entropy) > 0.9 * entropy[0]
    text = capsys.readouterr().out
    assert "Template collapse" in text
    assert "A trace of the last step" in text
    assert main(["demo", "--out", str(out)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_what_the_command_cannot_do_is_told_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for arguments, why in (
        (["--steps", "0"], "--steps 0: at least one"),
        (["--seed", "-1"], "--seed -1: a whole number from 0"),
        (["--seed", "9" * 20], "a whole number from 0 to 9223372036854775807"),
        (["--out", str(tmp_path / "file")], "is a file, so"),
    ):
        assert main(["demo", *arguments]) == 2
        told = capsys.readouterr()
        assert (told.out, why in told.err) == ("", True), told.err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_template_collapse(seed: int) -> None:
    records = watched(dataclasses.replace(SCENARIOS["template-collapse"].settings, seed=seed), every=10)
    accuracy, entropy = (series(records, KEY + n) for n in ("retrieval_accuracy", "conditional_entropy_est"))
    assert accuracy[0] > 0.95
    assert np.mean(accuracy[-3:]) < 0.25
    assert min(entropy) > 0.9 * entropy[0]
    valid = np.sort(series(records, "format/valid_fraction")[-50:])
    assert np.median(valid) > 0.95
    assert valid[2] > 0.9  # a policy that leaps stumbles for a step or two
    # The reward tells nothing of it.
    reward = series(records, "reward/mean")
    assert abs(np.mean(reward[:20]) - np.mean(reward[-20:])) < 0.06


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_healthy_training_stays_input_dependent(seed: int) -> None:
    records = watched(dataclasses.replace(SCENARIOS["healthy"].settings, seed=seed), every=10)
    assert min(series(records, KEY + "retrieval_accuracy")) > 0.8
    reward = series(records, "reward/mean")
    assert np.mean(reward[-10:]) > np.mean(reward[:5]) + 0.2


@pytest.mark.slow
def test_an_entropy_bonus_alone_breaks_the_format() -> None:
    records = watched(SCENARIOS["entropy-bonus"].settings, every=10)
    valid, entropy = series(records, "format/valid_fraction"), series(records, "entropy/token_mean")
    assert valid[0] > 0.9
    assert valid[-1] < 0.2
    assert np.mean(entropy[-20:]) > entropy[0] + 0.5  # it swings once nothing of the format is left
