"""Room: readers. Saved files in, one RolloutBatch per step out.

    for batch in read_rollouts("runs/dump"):
        ...

One file a source; `detect_source` picks one and says why; `tokenize_batch` gives token ids to text.
"""

from __future__ import annotations

from collapsediag.readers._options import ReadOptions
from collapsediag.readers.atropos import from_atropos
from collapsediag.readers.detect import SOURCES, Detection, detect_source
from collapsediag.readers.generic import from_jsonl
from collapsediag.readers.nemo_gym import from_nemo_gym
from collapsediag.readers.nested import from_nested
from collapsediag.readers.parallel import from_parallel
from collapsediag.readers.read import read_rollouts
from collapsediag.readers.tinker import from_tinker
from collapsediag.readers.tokenization import tokenize_batch
from collapsediag.readers.trl import from_trl
from collapsediag.readers.verifiers import from_verifiers
from collapsediag.readers.verl import from_verl

__all__ = [
    "SOURCES",
    "Detection",
    "ReadOptions",
    "detect_source",
    "from_atropos",
    "from_jsonl",
    "from_nemo_gym",
    "from_nested",
    "from_parallel",
    "from_tinker",
    "from_trl",
    "from_verifiers",
    "from_verl",
    "read_rollouts",
    "tokenize_batch",
]
