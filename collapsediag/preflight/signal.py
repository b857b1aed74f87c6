"""The checks of `preflight` that ask whether the batch holds anything to learn: format, rewards, pass@k, tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collapsediag.metrics.reward_input import is_scored
from collapsediag.metrics.rewards import SPREAD_HELPED, SPREAD_HIGH, SPREAD_HURT, SPREAD_LOW
from collapsediag.plain_text import counted
from collapsediag.preflight.types import Check, Facts, percent, rows_of

VALID_OK, VALID_WARNING = 0.95, 0.5
UNCLOSED_WARNING = 0.05
UNSCORED_WARNING = 0.05
WITHOUT_SIGNAL, WITHOUT_SIGNAL_SEVERE = 0.5, 0.8
NEARLY_SOLVED = 0.9
MALFORMED_WARNING, ERROR_WARNING, USE_INFO = 0.1, 0.3, 0.3
MIN_RESULTS = 10


def output_format(facts: Facts) -> Check:
    """Do the outputs have the form that the reward and the parsers rely on?"""
    name, key = "format", "format/valid_fraction"
    share = facts.values.get(key)
    if share is None:
        return facts.skipped(name, key, "format")
    reasons = sorted(
        ((v, k[len("format/") : -len("_fraction")]) for k, v in facts.values.items() if _is_failure(k) and v > 0),
        reverse=True,
    )
    why = ", ".join(f"{reason.replace('_', ' ')} {percent(v)}" for v, reason in reasons[:3])
    unclosed = facts.values.get("format/unclosed_think_fraction", 0.0)
    if not facts.declared and unclosed > UNCLOSED_WARNING:
        return Check(
            name=name,
            status="warning",
            value=unclosed,
            reading=f"{percent(unclosed)} of the outputs open <think> and never close it.",
            action="Look at truncation first; otherwise warm the policy up on its format. An output without an end to "
            "its reasoning has no answer to score.",
        )
    if not facts.declared and share < VALID_WARNING:
        return Check(
            name=name,
            status="skipped",
            value=share,
            reading=f"no format was declared, and {percent(share)} of the outputs have the default one (<think> and "
            "<answer> tags), so it is not theirs.",
            action="Declare the format that your reward expects, --format (format=), to have it checked.",
        )
    if share >= VALID_OK:
        return Check(name=name, status="ok", value=share, reading=f"{percent(share)} of the outputs are in the format.")
    return Check(
        name=name,
        status="warning" if share >= VALID_WARNING or not facts.declared else "critical",
        value=share,
        reading=f"{percent(share)} of the outputs are in the format ({why}).",
        action="An output the parser cannot read is scored as wrong, whatever it says. Show the format in the prompt "
        "or warm the policy up on it.",
    )


def _is_failure(key: str) -> bool:
    return key.startswith("format/") and key.endswith("_fraction") and key != "format/valid_fraction"


def reward_sanity(facts: Facts) -> Check:
    """Is there a reward, does it vary, and does it agree with the success labels?"""
    name, values = "rewards", facts.values
    if "reward/mean" not in values:
        return facts.skipped(name, "reward/mean", "reward")
    mean, std, unscored = values["reward/mean"], values["reward/std"], values.get("reward/n_unscored", 0.0)
    solved = [r.reward for r in facts.batch if r.success is True and is_scored(r.reward)]
    failed = [r.reward for r in facts.batch if r.success is False and is_scored(r.reward)]
    if solved and failed and sum(solved) / len(solved) <= sum(failed) / len(failed):
        return Check(
            name=name,
            status="critical",
            value=mean,
            reading=f"solved rollouts get {sum(solved) / len(solved):.3g} on average, failed ones "
            f"{sum(failed) / len(failed):.3g}: the reward does not reward success.",
            action="Look for a flipped sign, or a penalty that outweighs the success reward.",
        )
    if std == 0:
        return Check(
            name=name,
            status="warning",
            value=mean,
            reading=f"every rollout has the same reward, {mean:.4g}: there is nothing to learn from this batch.",
            action="Solved or failed throughout: change the difficulty. Otherwise look whether the reward function "
            "runs at all.",
        )
    if unscored > UNSCORED_WARNING * len(facts.batch):
        return Check(
            name=name,
            status="warning",
            value=unscored,
            reading=f"{unscored:.0f} of {len(facts.batch)} rollouts have no reward; they are left out of every number.",
            action="Find out why the reward function gave none: trainers often count that as 0.",
            rows=rows_of(facts, lambda row: _unscored(facts, row)),
        )
    left_out = f"; left out, without a reward: {counted(unscored, 'rollout')}" if unscored else ""
    return Check(
        name=name,
        status="info" if unscored else "ok",
        value=mean,
        reading=f"mean {mean:.3g}, std {std:.3g}{left_out}.",
    )


def _unscored(facts: Facts, row: int) -> bool:
    return not is_scored(facts.batch.rollouts[row].reward)


def groups_without_signal(facts: Facts) -> Check:
    """How many prompts have equal rewards throughout, at which end, and how many would by chance?"""
    name, key, values = "prompts without signal", "reward/all_equal_fraction", facts.values
    share = values.get(key)
    if share is None:
        return facts.skipped(name, key, "reward/within_group_std", "reward")
    if values["reward/std"] == 0:
        return Check(
            name=name, status="skipped", value=share, reading="all rewards of the batch are the same, see there."
        )
    solved, failed = values.get("reward/all_success_fraction"), values.get("reward/all_fail_fraction")
    expected = values.get("reward/expected_all_equal_fraction")
    interval = facts.interval(key)
    sentence = f"{percent(share)} of the prompts have equal rewards throughout: no group-relative gradient from those"
    if share == 0:
        return Check(
            name=name, status="ok", value=share, interval=interval, reading="rewards differ within every prompt."
        )
    if solved is None or failed is None:
        return Check(
            name=name,
            status="warning" if share >= WITHOUT_SIGNAL_SEVERE else "info" if share >= WITHOUT_SIGNAL else "ok",
            value=share,
            interval=interval,
            reading=f"{sentence}. Whether they are solved or failed is not known: there are no success labels.",
            action=""
            if share < WITHOUT_SIGNAL
            else "Give success labels or a success threshold, to tell saturation from prompts that are too hard.",
        )
    chance = "" if expected is None else f", {percent(expected)} would be by chance at this success rate"
    sentence += f" ({percent(solved)} all solved, {percent(failed)} all failed{chance})"
    if failed >= WITHOUT_SIGNAL and failed >= solved:
        return Check(
            name=name,
            status="critical" if failed >= WITHOUT_SIGNAL_SEVERE else "warning",
            value=share,
            interval=interval,
            reading=f"{sentence}: most prompts are too hard for this policy.",
            action="Start from easier prompts or a stronger policy, or sample more per prompt; and make sure that the "
            "reward can be earned at all.",
        )
    if solved >= WITHOUT_SIGNAL:
        return Check(
            name=name,
            status="info",
            value=share,
            interval=interval,
            reading=f"{sentence}. That is saturation, not ill health: the policy solves most of these prompts already.",
            action="Little is left to learn here: choose harder prompts, or training spends most rollouts on nothing.",
        )
    return Check(name=name, status="ok", value=share, interval=interval, reading=f"{sentence}.")


def variance_spread(facts: Facts) -> Check:
    """Does reward variance differ between prompts enough for a filter on it to help?"""
    name, key = "spread of reward variance", "reward/variance_spread"
    spread = facts.values.get(key)
    if spread is None:
        return facts.skipped(name, key, "reward/within_group_std", "reward")
    kept = facts.values.get("reward/filter_keep_fraction")
    effect = "" if kept is None else f" A filter at rho = 0.9 would keep {percent(kept)} of the prompts."
    scale = f"{spread:.2f} (filtering by variance helped at about {SPREAD_HELPED}, and hurt at {SPREAD_HURT})"
    equal = facts.values.get("reward/all_equal_fraction", 0.0)
    if spread >= SPREAD_HIGH:
        source = ", mostly because many have equal rewards throughout" if equal >= WITHOUT_SIGNAL else ""
        return Check(
            name=name,
            status="ok",
            value=spread,
            reading=f"{scale}: prompts differ a lot in signal{source}.{effect}",
            action="Filtering prompts by reward variance is worth trying.",
        )
    low = spread <= SPREAD_LOW
    return Check(
        name=name,
        status="info",
        value=spread,
        reading=f"{scale}: {'prompts hardly differ' if low else 'prompts differ somewhat'} in signal.{effect}",
        action="Do not filter by reward variance here: it would throw away prompts that teach as much as the others."
        if low
        else "Try a filter by reward variance against a run without.",
    )


def pass_at_k(facts: Facts) -> Check:
    """Is there anything between one try and many?"""
    name, values = "pass@k", facts.values
    ks = sorted(int(k[5:]) for k in values if k.startswith("pass@") and k[5:].isdigit())
    if not ks:
        return facts.skipped(name, "pass@k")
    one, many, top = values[f"pass@{ks[0]}"], values[f"pass@{ks[-1]}"], ks[-1]
    interval = facts.interval(f"pass@{ks[-1]}")
    words = f"pass@{ks[0]} {one:.2f}" + (f", pass@{top} {many:.2f}" if top > ks[0] else "")
    if many == 0:
        return Check(
            name=name,
            status="critical",
            value=many,
            interval=interval,
            reading=f"{words}: no rollout of any prompt succeeds, so no success can be reinforced.",
            action="Start from easier prompts or a stronger policy, and make sure that the success check can pass.",
        )
    if one >= NEARLY_SOLVED:
        return Check(
            name=name,
            status="info",
            value=many,
            interval=interval,
            reading=f"{words}: nearly solved at the first try, little headroom.",
            action="Choose harder prompts.",
        )
    return Check(name=name, status="ok", value=many, interval=interval, reading=f"{words}.")


def tool_use(facts: Facts) -> Check:
    """Do the tool calls parse, succeed, and get read?"""
    name, values = "tool calls", facts.values
    if not values.get("tools/n_calls"):
        known = "tools/n_calls" in values
        return (
            Check(name=name, status="skipped", reading="no tool is called.") if known else facts.skipped(name, "tools")
        )
    rate, calls = values["tools/call_rate"], values["tools/calls_per_rollout"]
    words = f"{percent(rate)} of the rollouts call a tool, {calls:.2g} calls per rollout"
    used, judged = values.get("tools/result_use_rate"), values.get("tools/n_results_judged", 0.0)
    if used is not None:
        words += f"; later turns repeat something of {percent(used)} of {judged:.0f} results"
    malformed, errors = values.get("tools/malformed_rate", 0.0), values.get("tools/error_rate", 0.0)
    if malformed > MALFORMED_WARNING or errors > ERROR_WARNING:
        return Check(
            name=name,
            status="warning",
            value=max(malformed, errors),
            reading=f"{words}; {percent(malformed)} do not parse, {percent(errors)} of the others return an error.",
            action="Read a few failed calls: a prompt that shows another syntax, a closing tag lost as a stop string, "
            "or a tool that is down.",
        )
    if used is not None and used < USE_INFO and judged >= MIN_RESULTS:
        return Check(
            name=name,
            status="info",
            value=used,
            interval=facts.interval("tools/result_use_rate"),
            reading=f"{words}.",
            action="Read whether the policy uses what its tools return; calls that are not read are the first to go.",
        )
    return Check(name=name, status="ok", value=rate, interval=facts.interval("tools/call_rate"), reading=f"{words}.")


SIGNAL_CHECKS: Sequence[Callable[[Facts], Check]] = (
    output_format,
    reward_sanity,
    groups_without_signal,
    variance_spread,
    pass_at_k,
    tool_use,
)
