"""What a veRL trainer's config says about scoring: limits, which contract its workers speak, and what rules it out."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapsediag.errors import SettingsError
from collapsediag.integrations.verl import SECTION
from collapsediag.integrations.verl.rows import Row
from collapsediag.integrations.verl.scorer import Contract, Limits, ScoreDataProto, score_tensordict
from collapsediag.integrations.verl.settings import VerlSettings
from collapsediag.run_folder import METRICS_FILE

logger = logging.getLogger("collapsediag")

# Name of the metric that says so (`collapse/not_scored_...`): why, in words.
REFUSALS: Mapping[str, str] = {
    "router_replay": "not scored: with router replay the workers force the experts recorded with each rollout, and "
    "crossed pairs have none",
    "images": "not scored: rollouts hold images, which another prompt's tokens cannot stand in for",
    "switched_off": "not scored: collapsediag.score=false",
}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Of the policy's config, as far as it could be read. vocabulary, positions: None where unknown."""

    vocabulary: int | None = None
    positions: int | None = None
    end_tokens: tuple[int, ...] = ()


def model_facts(trainer: Any) -> ModelFacts:
    """Read from where the policy was loaded; a config that cannot be read here costs no more than a check."""
    model = trainer.config.actor_rollout_ref.model
    try:
        from transformers import AutoConfig
        from verl.utils.fs import copy_to_local

        path = copy_to_local(model.path)
        trusted = bool(model.get("trust_remote_code", False))
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusted).get_text_config()
    except Exception as error:
        logger.info("the policy's config cannot be read on the driver (%s): ids are not checked", error)
        return ModelFacts(end_tokens=_end_tokens(trainer.tokenizer))
    return ModelFacts(
        vocabulary=getattr(config, "vocab_size", None),
        positions=getattr(config, "max_position_embeddings", None),
        end_tokens=_end_tokens(trainer.tokenizer, config, _generation_config(path)),
    )


def _generation_config(path: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # a model need not have one
        return None


def _end_tokens(*sources: Any) -> tuple[int, ...]:
    """Every token that one of these calls the end; samplers stop at all of them."""
    found: list[int] = []
    for source in sources:
        ends = getattr(source, "eos_token_id", None)
        found += [ends] if isinstance(ends, int) else list(ends or ())
    return tuple(dict.fromkeys(found))


def response_limit(config: Any) -> int:
    """Tokens of the longest response that the sampler allows."""
    return int(config.actor_rollout_ref.rollout.get("response_length") or config.data.max_response_length)


def training_row_tokens(config: Any) -> int:
    """Tokens of the longest row that training itself can have."""
    prompt = config.actor_rollout_ref.rollout.get("prompt_length") or config.data.max_prompt_length
    return int(prompt) + response_limit(config)


def limits_of(config: Any, facts: ModelFacts) -> Limits:
    """Limits under which scoring needs no more memory than the trainer's own log-prob pass."""
    rollout = config.actor_rollout_ref.rollout
    row = training_row_tokens(config)
    if rollout.get("log_prob_use_dynamic_bsz"):
        micro = int(rollout.log_prob_max_token_len_per_gpu)
    else:
        micro = row * int(rollout.get("log_prob_micro_batch_size_per_gpu") or 1)
    micro = max(micro, row)
    # The longest prompt with the longest trace of another may be longer than any row of training.
    longest = micro if facts.positions is None else min(micro, max(facts.positions, row))
    return Limits(
        temperature=float(rollout.temperature),
        row_tokens=longest,
        micro_batch_tokens=micro,
        vocabulary=facts.vocabulary,
    )


def has_engine_workers(config: Any) -> bool:
    """Whether the workers of this veRL and config speak TensorDict: 0.8 on, and 0.7 where told to."""
    import verl

    version = tuple(int(n) for n in re.findall(r"\d+", verl.__version__)[:2])
    chosen = config.trainer.get("use_legacy_worker_impl", "auto")
    return version >= (0, 8) or (version == (0, 7) and chosen == "disable")


def contract_of(trainer: Any) -> Contract:
    """How this trainer's workers are asked, row by row."""
    if has_engine_workers(trainer.config):
        return score_tensordict
    pad = trainer.tokenizer.pad_token_id
    return ScoreDataProto(pad_token=0 if pad is None else int(pad))


def check_config(settings: VerlSettings, config: Any) -> None:
    """Raise SettingsError for settings that do not go with the rest of the config; nothing need be loaded for it."""
    if settings.share_prefixes and (reasons := _prefix_obstacles(config)):
        raise SettingsError(
            f"{SECTION}.share_prefixes=true is not possible here: {'; '.join(reasons)}. Leave it out: rows are then "
            "scored in full, through the trainer's own log-prob pass."
        )
    begins_anew = config.trainer.get("resume_mode", "auto") == "disable"
    if settings.out is not None and begins_anew and (Path(settings.out) / METRICS_FILE).exists():
        raise SettingsError(
            f"{SECTION}.out={settings.out} holds a run already, and trainer.resume_mode=disable begins a new one. "
            "Choose another folder."
        )


def _prefix_obstacles(config: Any) -> list[str]:
    """Why the model inside the workers cannot be scored as a transformers model."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    found = []
    if actor.strategy not in ("fsdp", "fsdp2"):
        found.append(f"actor.strategy is {actor.strategy}, not fsdp or fsdp2")
    if int(actor.get("ulysses_sequence_parallel_size") or 1) > 1:
        found.append("sequences are split over ranks (ulysses_sequence_parallel_size)")
    if model.get("use_fused_kernels"):
        found.append("fused kernels compute no logits (use_fused_kernels)")
    return found


def lasting_refusal(config: Any) -> str | None:
    """Why nothing may be scored in this run: a key of REFUSALS, or None."""
    actor = config.actor_rollout_ref.actor
    for backend in ("megatron", "veomni"):
        replay = (actor.get(backend) or {}).get("router_replay") or {}
        if replay.get("mode", "disabled") != "disabled":
            return "router_replay"
    replay = actor.get("router_replay") or {}
    return "router_replay" if replay.get("mode", "disabled") != "disabled" else None


def lasting_notes(config: Any) -> list[str]:
    """What a reader of every record of this run must know."""
    notes = []
    temperature = float(config.actor_rollout_ref.rollout.temperature)
    if temperature != 1.0:
        notes.append(f"log-likelihoods are of softmax(logits / {temperature:g}), the distribution that was sampled")
    if _section(config, "rollout_correction").get("bypass_mode"):
        notes.append("old_log_probs are the sampler's own (bypass mode): collapse/own_logp_difference compares engines")
    if _section(config, "filter_groups").get("enable"):
        notes.append("groups of equal rewards were removed before the batch came here (algorithm.filter_groups)")
    return notes


def first_of_note(trainer: Any) -> str | None:
    """A note where a step has several updates, of which the first batch is measured."""
    updates = int(getattr(trainer, "parameter_sync_step", 1))
    return None if updates == 1 else f"measured on the first of the {updates} batches of this step"


def staleness_note(rows: list[Row], step: int) -> str | None:
    """A note where rollouts were written by weights older than the step's own."""
    ages = [step - 1 - row.weights_from for row in rows if row.weights_from is not None]
    stale = [age for age in ages if age > 0]
    if not stale:
        return None
    return (
        f"{len(stale)} of {len(rows)} rollouts were written by weights up to {max(stale)} steps older than the scorer's"
    )


def _section(config: Any, name: str) -> Any:
    return config.algorithm.get(name) or {}
