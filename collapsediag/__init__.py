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
    "CollapsediagError": "collapsediag.errors",
    "DropReason": "collapsediag.pairs",
    "EmaStd": "collapsediag.statistics",
    "LogLikelihoodMatrix": "collapsediag.matrix",
    "MetricInfo": "collapsediag.metrics.registry",
    "Record": "collapsediag.record",
    "Rollout": "collapsediag.rollouts",
    "RolloutBatch": "collapsediag.rollouts",
    "ScoringPairs": "collapsediag.pairs",
    "ToolCall": "collapsediag.rollouts",
    "Turn": "collapsediag.rollouts",
    "conditional_entropy": "collapsediag.metrics.information",
    "matrix_metrics": "collapsediag.metrics.from_matrix",
    "mutual_information": "collapsediag.metrics.information",
    "reasoning_entropy": "collapsediag.metrics.information",
    "retrieval_accuracy": "collapsediag.metrics.retrieval",
}

__all__ = sorted([*_WHERE, "__version__"])

if TYPE_CHECKING:
    from collapsediag.errors import CollapsediagError as CollapsediagError
    from collapsediag.matrix import LogLikelihoodMatrix as LogLikelihoodMatrix
    from collapsediag.metrics.from_matrix import matrix_metrics as matrix_metrics
    from collapsediag.metrics.information import conditional_entropy as conditional_entropy
    from collapsediag.metrics.information import mutual_information as mutual_information
    from collapsediag.metrics.information import reasoning_entropy as reasoning_entropy
    from collapsediag.metrics.registry import MetricInfo as MetricInfo
    from collapsediag.metrics.retrieval import retrieval_accuracy as retrieval_accuracy
    from collapsediag.pairs import DropReason as DropReason
    from collapsediag.pairs import ScoringPairs as ScoringPairs
    from collapsediag.record import Record as Record
    from collapsediag.rollouts import Rollout as Rollout
    from collapsediag.rollouts import RolloutBatch as RolloutBatch
    from collapsediag.rollouts import ToolCall as ToolCall
    from collapsediag.rollouts import Turn as Turn
    from collapsediag.statistics import EmaStd as EmaStd


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'collapsediag' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
