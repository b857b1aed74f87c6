"""The stories that the demo can tell, and what to look at in each."""

from __future__ import annotations

from dataclasses import dataclass

from collapsediag.demo.training import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run and the words around it. title: one line. story: what will happen and where to look."""

    title: str
    story: str
    settings: TrainingSettings


SCENARIOS = {
    "template-collapse": Scenario(
        title="Template collapse: reasoning that no longer depends on the prompt",
        story=(
            "The reward asks for a door that the policy hardly ever finds, so it is almost noise. Watch the columns "
            "reward, format and H(Z|X): but for a step or two they look healthy to the end. Then watch retrieval: at "
            "first every trace tells which prompt it was written for; at the end none does better than chance."
        ),
        settings=TrainingSettings(reward="hard", entropy_bonus=0.005),
    ),
    "healthy": Scenario(
        title="Healthy training: reward rises and reasoning goes on depending on the prompt",
        story=(
            "The reward can be learnt, and it is paid for reasoning that reads the prompt. Reward rises, the policy "
            "grows more certain (H(Z|X) falls a little), and retrieval stays where it was."
        ),
        settings=TrainingSettings(reward="readable"),
    ),
    "entropy-bonus": Scenario(
        title="Entropy without reward: the bonus is all that is left to follow",
        story=(
            "Every rollout earns the same, so the only gradient is that of the entropy bonus. H(Z|X) rises, the "
            "format breaks, and what is left of the reasoning says nothing of the prompt."
        ),
        settings=TrainingSettings(reward="constant", entropy_bonus=0.05, lr=1e-4, steps=60),
    ),
}
