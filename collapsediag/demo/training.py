"""Group-relative policy gradient on the demo's task, handing out each step's rollouts before the weights change.

    training = DemoTraining(TrainingSettings())
    for step, batch in training.steps():
        monitor.observe(step, batch)

Legend: P prompts, G samples of each, B = P * G rollouts, T output tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from collapsediag.demo import task
from collapsediag.demo.policy import new_policy, output_logits, sample, warm_up
from collapsediag.metrics.snr_filter import snr_filter_preview
from collapsediag.rollouts import Rollout, RolloutBatch, Turn


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a run of the demo's trainer depends on; equal settings give equal runs.

    reward: "hard" (a door it hardly ever gets right), "readable" (a door and reasoning it can learn), or "constant".
    format_share: part of the reward that is paid for the format alone.
    reward_noise: standard deviation of the Gaussian noise added to every reward.
    entropy_bonus: weight of the mean token entropy in the objective.
    kl: weight of the mean token KL divergence from the warmed-up policy, exact over the vocabulary.
    filter_rho: an update uses the fewest prompts that carry this share of the reward variance within prompts (RAGEN-2's
        filter, `snr_filter_preview`), and leaves the others out with all their terms; None: it uses all of them.
    lr_ramp: updates over which the learning rate rises to `lr`. Adam's first steps are all of full size, whatever the
        gradient; without a ramp they can break the format before the reward defends it.
    """

    reward: Literal["hard", "readable", "constant"] = "hard"
    steps: int = 100
    n_prompts: int = 16
    group_size: int = 16
    lr: float = 1e-3
    lr_ramp: int = 1
    entropy_bonus: float = 0.0
    kl: float = 0.0
    reward_noise: float = 0.0
    filter_rho: float | None = None
    format_share: float = 0.1
    warm_up_steps: int = 400
    seed: int = 0


class DemoTraining:
    """A policy and the training of it. Constructing warms the policy up (some seconds).

    policy: one that was warmed up before, for many runs from one start; it is trained in place.
    """

    def __init__(self, settings: TrainingSettings, *, policy: LlamaForCausalLM | None = None) -> None:
        self.settings = settings
        self.tokenizer = task.WordTokenizer()
        self.policy = policy if policy is not None else new_policy(settings.seed)
        if policy is None:
            warm_up(self.policy, steps=settings.warm_up_steps, seed=settings.seed)
        self._rng = np.random.default_rng([settings.seed, 2])
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=settings.lr, weight_decay=0.0)
        self._reference = copy.deepcopy(self.policy).requires_grad_(False) if settings.kl else None
        self._updates = 0

    def steps(self, *, every: int = 1) -> Iterator[tuple[int, RolloutBatch]]:
        """(step, its rollouts), each before the update made from them; the last one is followed by no update.

        every: only steps divisible by it are handed out; the training is the same.
        """
        for step in range(self.settings.steps + 1):
            prompts = task.draw_prompts(self._rng, self.settings.n_prompts)
            prompt_BL = torch.tensor([p.ids for p in prompts]).repeat_interleave(self.settings.group_size, dim=0)
            output_BT = sample(self.policy, prompt_BL, self._generator)
            if step % every == 0:
                yield step, self._batch(step, prompts, prompt_BL, output_BT)
            if step < self.settings.steps:
                self._update(prompts, prompt_BL, output_BT)

    def _update(self, prompts: list[task.Prompt], prompt_BL: Tensor, output_BT: Tensor) -> None:
        """One step on `-A log pi(output) - bonus * H`, a mean over tokens; A is the reward normalised in its group."""
        reward_PG = torch.tensor([r for r, _ in self._rewards(prompts, output_BT)]).view(-1, self.settings.group_size)
        self._updates += 1
        kept_B = self._kept(reward_PG).repeat_interleave(self.settings.group_size)
        if not kept_B.any():
            return  # no prompt has any reward variance
        advantage_B = group_advantages(reward_PG).flatten()
        logp_BTV = output_logits(self.policy, torch.cat([prompt_BL, output_BT], dim=1)).log_softmax(-1)
        mask_BT = _mask(output_BT) * kept_B[:, None]
        chosen_BT = logp_BTV.gather(-1, output_BT[..., None])[..., 0]
        entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
        objective_BT = advantage_B[:, None] * chosen_BT + self.settings.entropy_bonus * entropy_BT
        if self._reference is not None:
            reference_BTV = output_logits(self._reference, torch.cat([prompt_BL, output_BT], dim=1)).log_softmax(-1)
            objective_BT = objective_BT - self.settings.kl * (logp_BTV.exp() * (logp_BTV - reference_BTV)).sum(-1)
        loss = -(objective_BT * mask_BT).sum() / mask_BT.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.lr * min(1.0, self._updates / max(1, self.settings.lr_ramp))
        self._optimizer.step()

    def _kept(self, reward_PG: Tensor) -> Tensor:
        """Which prompts the update uses, bool [P]."""
        if self.settings.filter_rho is None:
            return torch.ones(len(reward_PG), dtype=torch.bool)
        kept_P = torch.zeros(len(reward_PG), dtype=torch.bool)
        kept_P[torch.from_numpy(snr_filter_preview(reward_PG.numpy(), rho=self.settings.filter_rho).kept)] = True
        return kept_P

    def _rewards(self, prompts: list[task.Prompt], output_BT: Tensor) -> list[tuple[float, bool]]:
        """(reward, solved) of each output."""
        rewards = []
        # Seeded by the update, so that the batch shows the very rewards that the update follows.
        noise_B = np.random.default_rng([self.settings.seed, 3, self._updates]).standard_normal(len(output_BT))
        for row, output in enumerate(_unpadded(output_BT)):
            parsed, prompt = task.parse(output), prompts[row // self.settings.group_size]
            solves = task.solves_readable if self.settings.reward == "readable" else task.solves_hard
            solved = solves(parsed, prompt)
            share = self.settings.format_share
            reward = 1.0 if self.settings.reward == "constant" else (1 - share) * solved + share * parsed.valid
            rewards.append((float(reward + self.settings.reward_noise * noise_B[row]), solved))
        return rewards

    def _batch(self, step: int, prompts: list[task.Prompt], prompt_BL: Tensor, output_BT: Tensor) -> RolloutBatch:
        with torch.no_grad():
            logp_BTV = output_logits(self.policy, torch.cat([prompt_BL, output_BT], dim=1)).log_softmax(-1)
        chosen_BT = logp_BTV.gather(-1, output_BT[..., None])[..., 0].clamp(max=0.0)
        entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
        rollouts = []
        scored = zip(_unpadded(output_BT), self._rewards(prompts, output_BT), strict=True)
        for row, (output, (reward, solved)) in enumerate(scored):
            ended = output[-1] == task.IDS[task.EOS]
            turn = Turn(
                context_ids=prompt_BL[row].numpy(),
                output_ids=np.array(output),
                context=self.tokenizer.decode(prompt_BL[row].tolist()),
                output=self.tokenizer.decode(output[:-1] if ended else output),
                logprobs=chosen_BT[row, : len(output)].numpy(),
                entropies=entropy_BT[row, : len(output)].numpy(),
                finish_reason="stop" if ended else "length",
            )
            group = row // self.settings.group_size
            rollouts.append(Rollout(turns=(turn,), group=group, reward=reward, success=solved))
        eos = (task.IDS[task.EOS],)
        return RolloutBatch(
            step=step, rollouts=tuple(rollouts), max_output_tokens=task.MAX_OUTPUT, eos_token_ids=eos, source="demo"
        )


def group_advantages(reward_PG: Tensor) -> Tensor:
    """Rewards normalised within each group, [P, G]: minus the mean, over the sample std (GRPO, arXiv 2402.03300)."""
    centred = reward_PG - reward_PG.mean(dim=1, keepdim=True)
    return centred / (reward_PG.std(dim=1, keepdim=True) + 1e-6)


def _mask(output_BT: Tensor) -> Tensor:
    """1.0 up to and including the first end token of each row."""
    ended = (output_BT == task.IDS[task.EOS]).cumsum(dim=1)
    return ((ended == 0) | ((ended == 1) & (output_BT == task.IDS[task.EOS]))).float()


def _unpadded(output_BT: Tensor) -> list[list[int]]:
    lengths = _mask(output_BT).sum(dim=1).long().tolist()
    return [row[:length] for row, length in zip(output_BT.tolist(), lengths, strict=True)]
