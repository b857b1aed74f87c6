"""Diagnostics for collapse in LLM reinforcement learning that reward and entropy curves hide.

Importing this package loads numpy, scipy and the standard library. Names that need torch load it when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that holds it. Resolved on first use, so that `import collapsediag` stays light and a training
# process never pays for a room it does not enter.
_WHERE = {
    "BudgetScorer": "collapsediag.scoring.budget",
    "Cadence": "collapsediag.cadence",
    "CallableFormat": "collapsediag.metrics.format",
    "CallableSink": "collapsediag.callable_sink",
    "CollapsediagError": "collapsediag.errors",
    "ConsoleSink": "collapsediag.console",
    "DistributedScorer": "collapsediag.scoring.distributed",
    "DropReason": "collapsediag.pairs",
    "EmaStd": "collapsediag.statistics",
    "EntropyFit": "collapsediag.metrics.entropy_fit",
    "FanOut": "collapsediag.sinks",
    "Finding": "collapsediag.findings",
    "FindingSettings": "collapsediag.findings",
    "FunctionScorer": "collapsediag.scoring.function",
    "GradientProbe": "collapsediag.metrics.gradient",
    "HFScorer": "collapsediag.scoring.hf",
    "JsonFormat": "collapsediag.metrics.format_json",
    "JsonlSink": "collapsediag.sinks",
    "LogLikelihoodMatrix": "collapsediag.matrix",
    "MetricInfo": "collapsediag.metrics.registry",
    "Monitor": "collapsediag.monitor",
    "OpenAICompatibleScorer": "collapsediag.scoring.server",
    "PairSettings": "collapsediag.pairs",
    "PreflightReport": "collapsediag.preflight",
    "Provenance": "collapsediag.record",
    "Record": "collapsediag.record",
    "RegexFormat": "collapsediag.metrics.format_regex",
    "Rollout": "collapsediag.rollouts",
    "RolloutBatch": "collapsediag.rollouts",
    "RolloutReport": "collapsediag.metrics.from_rollouts",
    "SGLangScorer": "collapsediag.scoring.server",
    "Scorer": "collapsediag.scoring.protocol",
    "ScoringPairs": "collapsediag.pairs",
    "Sink": "collapsediag.sinks",
    "SnrFilterPreview": "collapsediag.metrics.snr_filter",
    "TagFormat": "collapsediag.metrics.format",
    "ToolCall": "collapsediag.rollouts",
    "ToolFormat": "collapsediag.metrics.format_json",
    "Turn": "collapsediag.rollouts",
    "Verdict": "collapsediag.findings",
    "build_pairs": "collapsediag.pairs",
    "conditional_entropy": "collapsediag.metrics.information",
    "entropy_metrics": "collapsediag.metrics.entropy_batch",
    "find_reasoning": "collapsediag.spans",
    "fit_reward_entropy": "collapsediag.metrics.entropy_fit",
    "from_history": "collapsediag.findings",
    "gradient_probe": "collapsediag.probe",
    "judge": "collapsediag.findings",
    "load_policy": "collapsediag.scoring.load",
    "matrix_metrics": "collapsediag.metrics.from_matrix",
    "mutual_information": "collapsediag.metrics.information",
    "pass_at_k": "collapsediag.metrics.pass_at_k",
    "predicted_entropy_change": "collapsediag.metrics.entropy",
    "read_records": "collapsediag.run_folder",
    "read_rollouts": "collapsediag.readers",
    "reasoning_entropy": "collapsediag.metrics.information",
    "retrieval_accuracy": "collapsediag.metrics.retrieval",
    "regimes": "collapsediag.findings",
    "reward_metrics": "collapsediag.metrics.rewards",
    "rollout_metrics": "collapsediag.metrics.from_rollouts",
    "rollout_report": "collapsediag.metrics.from_rollouts",
    "score": "collapsediag.scoring.short",
    "snr_filter_preview": "collapsediag.metrics.snr_filter",
    "token_entropy": "collapsediag.metrics.entropy",
    "tokenize_batch": "collapsediag.readers",
    "tool_metrics": "collapsediag.metrics.tools",
}

__all__ = sorted([*_WHERE, "__version__"])

if TYPE_CHECKING:
    from collapsediag.cadence import Cadence as Cadence
    from collapsediag.callable_sink import CallableSink as CallableSink
    from collapsediag.console import ConsoleSink as ConsoleSink
    from collapsediag.errors import CollapsediagError as CollapsediagError
    from collapsediag.findings import Finding as Finding
    from collapsediag.findings import FindingSettings as FindingSettings
    from collapsediag.findings import Verdict as Verdict
    from collapsediag.findings import from_history as from_history
    from collapsediag.findings import judge as judge
    from collapsediag.findings import regimes as regimes
    from collapsediag.matrix import LogLikelihoodMatrix as LogLikelihoodMatrix
    from collapsediag.metrics.entropy import predicted_entropy_change as predicted_entropy_change
    from collapsediag.metrics.entropy import token_entropy as token_entropy
    from collapsediag.metrics.entropy_batch import entropy_metrics as entropy_metrics
    from collapsediag.metrics.entropy_fit import EntropyFit as EntropyFit
    from collapsediag.metrics.entropy_fit import fit_reward_entropy as fit_reward_entropy
    from collapsediag.metrics.format import CallableFormat as CallableFormat
    from collapsediag.metrics.format import TagFormat as TagFormat
    from collapsediag.metrics.format_json import JsonFormat as JsonFormat
    from collapsediag.metrics.format_json import ToolFormat as ToolFormat
    from collapsediag.metrics.format_regex import RegexFormat as RegexFormat
    from collapsediag.metrics.from_matrix import matrix_metrics as matrix_metrics
    from collapsediag.metrics.from_rollouts import RolloutReport as RolloutReport
    from collapsediag.metrics.from_rollouts import rollout_metrics as rollout_metrics
    from collapsediag.metrics.from_rollouts import rollout_report as rollout_report
    from collapsediag.metrics.gradient import GradientProbe as GradientProbe
    from collapsediag.metrics.information import conditional_entropy as conditional_entropy
    from collapsediag.metrics.information import mutual_information as mutual_information
    from collapsediag.metrics.information import reasoning_entropy as reasoning_entropy
    from collapsediag.metrics.pass_at_k import pass_at_k as pass_at_k
    from collapsediag.metrics.registry import MetricInfo as MetricInfo
    from collapsediag.metrics.retrieval import retrieval_accuracy as retrieval_accuracy
    from collapsediag.metrics.rewards import reward_metrics as reward_metrics
    from collapsediag.metrics.snr_filter import SnrFilterPreview as SnrFilterPreview
    from collapsediag.metrics.snr_filter import snr_filter_preview as snr_filter_preview
    from collapsediag.metrics.tools import tool_metrics as tool_metrics
    from collapsediag.monitor import Monitor as Monitor
    from collapsediag.pairs import DropReason as DropReason
    from collapsediag.pairs import PairSettings as PairSettings
    from collapsediag.pairs import ScoringPairs as ScoringPairs
    from collapsediag.pairs import build_pairs as build_pairs
    from collapsediag.preflight import PreflightReport as PreflightReport
    from collapsediag.probe import gradient_probe as gradient_probe
    from collapsediag.readers import read_rollouts as read_rollouts
    from collapsediag.readers import tokenize_batch as tokenize_batch
    from collapsediag.record import Provenance as Provenance
    from collapsediag.record import Record as Record
    from collapsediag.rollouts import Rollout as Rollout
    from collapsediag.rollouts import RolloutBatch as RolloutBatch
    from collapsediag.rollouts import ToolCall as ToolCall
    from collapsediag.rollouts import Turn as Turn
    from collapsediag.run_folder import read_records as read_records
    from collapsediag.scoring.budget import BudgetScorer as BudgetScorer
    from collapsediag.scoring.distributed import DistributedScorer as DistributedScorer
    from collapsediag.scoring.function import FunctionScorer as FunctionScorer
    from collapsediag.scoring.hf import HFScorer as HFScorer
    from collapsediag.scoring.load import load_policy as load_policy
    from collapsediag.scoring.protocol import Scorer as Scorer
    from collapsediag.scoring.server import OpenAICompatibleScorer as OpenAICompatibleScorer
    from collapsediag.scoring.server import SGLangScorer as SGLangScorer
    from collapsediag.scoring.short import score as score
    from collapsediag.sinks import FanOut as FanOut
    from collapsediag.sinks import JsonlSink as JsonlSink
    from collapsediag.sinks import Sink as Sink
    from collapsediag.spans import find_reasoning as find_reasoning
    from collapsediag.statistics import EmaStd as EmaStd


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'collapsediag' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
