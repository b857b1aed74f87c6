"""Checks of what the policy does: entropy of its tokens, tool calls, format, length."""

from __future__ import annotations

import dataclasses

from collapsediag.findings.facts import Facts, Wording, fallen
from collapsediag.findings.finding import Finding
from collapsediag.findings.series import low_episodes

ENTROPY_NAMES = ("entropy/token_mean", "entropy/sampled_mean")


def entropy_collapse(facts: Facts) -> Finding:
    """Token entropy far below its start."""
    settings = facts.settings
    finding = fallen(
        facts,
        Wording(
            check="entropy_collapse",
            title="Entropy collapse",
            ok="Token entropy holds",
            what="token entropy",
            missing="no token entropies",
            meaning="The policy has stopped to explore; what it does not do now it will hardly learn any more.",
            next="Compare the reward with a measure that is not trained on; look at entropy bonus and clipping.",
        ),
        ENTROPY_NAMES,
        settings.token_entropy_low,
        settings.token_entropy_critical,
    )
    if finding.status != "ok":
        return finding
    falling = low_episodes(facts.series(*ENTROPY_NAMES), settings.token_entropy_falling, settings)
    if not falling.holds:
        return finding
    return dataclasses.replace(
        finding,
        status="info",
        title="Token entropy is falling",
        since_step=falling.since_step,
        n_steps=falling.n_steps,
        n_clear=falling.n_clear,
    )


def tool_use_collapse(facts: Facts) -> Finding:
    """Tool calls per rollout far below their start."""
    return fallen(
        facts,
        Wording(
            check="tool_use_collapse",
            title="Tool-use collapse",
            ok="Tools are used as at the start",
            what="tool calls per rollout",
            missing="no tool calls",
            meaning="The policy has given up its tools; answers come from memory or not at all.",
            next="Compare tools/reward_with_call with tools/reward_without_call; read rollouts of before and after.",
        ),
        ("tools/calls_per_rollout", "tools/call_rate"),
        facts.settings.calls_low,
        facts.settings.calls_critical,
        floor=facts.settings.min_calls,
    )


def format_loss(facts: Facts) -> Finding:
    """Fewer turns parse than at the start."""
    return fallen(
        facts,
        Wording(
            check="format_loss",
            title="Format loss",
            ok="The format holds",
            what="share of turns in the declared format",
            missing="no output text to judge the format by",
            meaning="Turns that do not parse get no fair reward, and their reasoning is not found either.",
            next="Look at format/*_fraction for what goes wrong, and at length/truncated_fraction.",
        ),
        ("format/valid_fraction",),
        facts.settings.format_low,
        facts.settings.format_critical,
        floor=facts.settings.min_format,
    )


def length_collapse(facts: Facts) -> Finding:
    """Completions far shorter than at the start."""
    return fallen(
        facts,
        Wording(
            check="length_collapse",
            title="Length collapse",
            ok="The length holds",
            what="mean length",
            missing="no lengths",
            meaning="Completions have shrunk: reasoning that was dropped, or was not needed.",
            next="Read traces from before and after, and see whether success on held-out prompts fell.",
        ),
        ("length/mean", "length_words/mean"),
        facts.settings.length_low,
        facts.settings.length_critical,
    )
