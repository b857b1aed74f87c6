"""Say what this installation can do: versions, extras, device, and whether the scorer is right on this machine.

    collapsediag doctor

The self-test scores a tiny random model both ways, through the engine and by plain forward passes, in seconds. Exit
code 1 where something that is installed is too old or does not work; an extra that is missing is no fault.
"""

from __future__ import annotations

import argparse
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from collapsediag import __version__
from collapsediag.errors import SettingsError
from collapsediag.plain_text import printable

DISTRIBUTION = "collapsediag"
DEVELOPMENT_EXTRAS = ("test", "docs")
# Of one trace under one prompt, between two orders of the same float32 sums.
MAX_DIFFERENCE = 1e-4

_REQUIREMENT = re.compile(
    r"^(?P<name>[\w.-]+)(?:\[(?P<extras>[^]]*)\])?\s*(?P<bounds>[^;]*?)\s*"
    r"(?:;.*\bextra\s*==\s*['\"](?P<extra>[\w.-]+)['\"].*)?$"
)


@dataclass(frozen=True, kw_only=True)
class Package:
    """One requirement of an extra. installed: its version, None where it is missing. minimum: "" where any will do."""

    name: str
    minimum: str
    installed: str | None

    @property
    def is_too_old(self) -> bool:
        """Whether it is there and below the minimum."""
        return self.installed is not None and _numbers(self.installed) < _numbers(self.minimum)

    def __str__(self) -> str:
        if self.installed is None:
            return f"{self.name} is missing"
        return f"{self.name} {self.installed}" + (f" is older than {self.minimum}" if self.is_too_old else "")


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What the scorer did with a tiny model. difference: largest to plain forward passes, nats per token."""

    device: str
    path: str
    reason: str | None
    difference: float
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether both ways agree."""
        return self.difference <= MAX_DIFFERENCE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Look, print, and judge."""
    print(f"collapsediag {__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    requirements = _requirements()
    core = packages(requirements, "")
    print("core: " + ", ".join(map(str, core)) + "\n")
    extras = {name: packages(requirements, name) for name in extra_names(requirements)}
    width = max(len(name) for name in extras)
    for name, needed in extras.items():
        print(f"{name:<{width}}  {extra_line(name, needed)}")
    print()
    too_old = any(package.is_too_old for needed in (core, *extras.values()) for package in needed)
    works = _tell_self_test(extras["hf"])
    print("Something does not work, see above." if too_old or not works else "All that is installed works.")
    return 1 if too_old or not works else 0


def _requirements() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise SettingsError(
            f"{DISTRIBUTION} is imported from {Path(__file__).parents[1]} but not installed, so what its extras need "
            "is not known here. In a checkout: pip install -e ."
        ) from error


def extra_names(requirements: Sequence[str]) -> list[str]:
    """The extras that users install, in the order of pyproject.toml."""
    found = (_parsed(line)["extra"] for line in requirements)
    return [name for name in dict.fromkeys(found) if name and name not in DEVELOPMENT_EXTRAS]


def packages(requirements: Sequence[str], extra: str) -> list[Package]:
    """What an extra needs beyond the core ("" is the core itself), those of extras it builds on first.

    >>> [p.name for p in packages(["a>=1", "b; extra == 'x'", "collapsediag[x]; extra == 'y'", "c; extra == 'y'"], "y")]
    ['b', 'c']
    """
    return list({package.name: package for package in _packages(requirements, extra)}.values())


def _packages(requirements: Sequence[str], extra: str) -> Iterator[Package]:
    for parsed in map(_parsed, requirements):
        if (parsed["extra"] or "") != extra:
            continue
        if parsed["name"] == DISTRIBUTION:
            for other in parsed["extras"].split(","):
                yield from _packages(requirements, other.strip())
            continue
        minimum = re.search(r">=\s*([\w.]+)", parsed["bounds"])
        yield Package(
            name=parsed["name"], minimum=minimum[1] if minimum else "", installed=_installed_version(parsed["name"])
        )


def extra_line(name: str, needed: Sequence[Package]) -> str:
    """What is there of an extra, and the line that brings the rest."""
    wrong = [package for package in needed if package.installed is None or package.is_too_old]
    if not wrong:
        return "ok: " + ", ".join(map(str, needed))
    return ", ".join(map(str, wrong)) + f": pip install 'collapsediag[{name}]'"


def self_test() -> SelfTest:
    """Score a tiny random model on the best device here, and compare every cell with plain forward passes."""
    import numpy as np

    from collapsediag.scoring.hf import HFScorer
    from collapsediag.scoring.load import best_device
    from collapsediag.scoring.short import pairs_of

    started = time.perf_counter()
    device = best_device()
    model = _tiny_model().to(device)
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 64, size=20).tolist()
    contexts = [[*shared, *rng.integers(1, 64, size=4 + p).tolist()] for p in range(4)]
    traces = [rng.integers(1, 64, size=6 + i).tolist() for i in range(8)]
    scorer = HFScorer(model)
    matrix = scorer.score(pairs_of(contexts, traces, own=[i % 4 for i in range(8)]))
    difference = max(
        abs(matrix.logp_NP[i, j] - _plain_logp(model, context, trace)) / len(trace)
        for i, trace in enumerate(traces)
        for j, context in enumerate(contexts)
    )
    assert scorer.info is not None
    return SelfTest(
        device=str(device),
        path=scorer.info.path,
        reason=scorer.info.reason,
        difference=float(difference) if difference == difference else float("inf"),
        seconds=time.perf_counter() - started,
    )


def _tell_self_test(hf: Sequence[Package]) -> bool:
    if any(package.installed is None for package in hf):
        print("self-test: skipped, because scoring with a model needs pip install 'collapsediag[hf]'")
        return True
    try:
        print(f"device: {_device_words()}")
        done = self_test()
    except Exception as error:  # whatever a broken installation raises is what the user must read
        print(f"self-test: FAILED, {type(error).__name__}: {printable(str(error))}")
        return False
    slow = f" (the fast path is not used: {printable(done.reason)})" if done.reason else ""
    print(
        f"self-test: {'ok' if done.is_right else 'FAILED'}, 8 traces under 4 prompts on {done.device}, {done.path} path"
        f"{slow}, {done.difference:.1e} nats per token from plain forward passes (at most {MAX_DIFFERENCE:g}), "
        f"{done.seconds:.1f} s"
    )
    return done.is_right


def _device_words() -> str:
    import torch

    from collapsediag.scoring.load import best_device

    device = best_device()
    if device.type != "cuda":
        return f"{device.type}, torch threads: {torch.get_num_threads()}"
    free, total = torch.cuda.mem_get_info()
    return f"cuda, {torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"


def _tiny_model() -> Any:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def _plain_logp(model: Any, context: list[int], trace: list[int]) -> float:
    import torch

    ids = torch.tensor([context + trace], device=model.device)
    with torch.no_grad():
        logp_TV = model(input_ids=ids).logits[0, len(context) - 1 : -1].double().log_softmax(-1)
    return float(logp_TV.gather(1, ids[0, len(context) :, None]).sum())


def _parsed(line: str) -> re.Match[str]:
    parsed = _REQUIREMENT.match(line)
    assert parsed is not None, line
    return parsed


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: enough to compare with a minimum.

    >>> _numbers("2.13.0+cpu") < _numbers("2.4"), _numbers("2.4") == _numbers("2.4.0")
    (False, True)
    """
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", release[0]).split(".")) if release else ()
