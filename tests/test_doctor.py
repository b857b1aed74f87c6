"""`collapsediag doctor`: what is there, what is missing, and whether the scorer is right."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.cli import doctor, main

from .conftest import import_or_skip

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = [
    "numpy>=1.24",
    "absent-a>=2; extra == 'hf'",
    'pytest>=1.0; extra == "wandb"',
    "pytest>=999.1,<1000; extra == 'old'",
    "collapsediag[hf,wandb]; extra == 'both'",
    "collapsediag[wandb]>=0; extra == 'both'",
    "pytest; extra == 'test'",
]


def pretend(monkeypatch: pytest.MonkeyPatch, requirements: list[str]) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)


def test_a_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    import_or_skip("transformers")
    state = np.random.get_state()[1]
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^hf +ok: torch \S+, transformers \S+$", out, re.MULTILINE)
    assert re.search(r"^self-test: ok, 8 traces under 4 prompts on \w+, prefix path, \S+ nats per token", out, re.M)
    assert out.endswith("All that is installed works.\n")
    np.testing.assert_array_equal(np.random.get_state()[1], state)


def test_the_self_test_notices_a_wrong_scorer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_or_skip("transformers")
    from collapsediag.scoring.hf import HFScorer

    right = HFScorer.score

    def wrong(self: Any, pairs: Any, progress: Any = None) -> Any:
        matrix = right(self, pairs, progress)
        matrix.logp_NP.flags.writeable = True
        matrix.logp_NP[7, 3] -= 0.01
        return matrix

    monkeypatch.setattr(HFScorer, "score", wrong)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "self-test: FAILED, 8 traces" in out
    assert out.endswith("Something does not work, see above.\n")


def test_a_self_test_that_raises_is_told_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise OSError("libcudart.so: cannot open\x1b[2J")

    import_or_skip("transformers")
    monkeypatch.setattr(doctor, "self_test", broken)
    assert main(["doctor"]) == 1
    assert "self-test: FAILED, OSError: libcudart.so: cannot open\\x1b[2J\n" in capsys.readouterr().out


def test_what_is_missing_comes_with_its_line_and_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, [line for line in REQUIREMENTS if "999" not in line])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    have = metadata.version("pytest")
    assert "\nhf     absent-a is missing: pip install 'collapsediag[hf]'\n" in out
    assert f"\nwandb  ok: pytest {have}\n" in out
    assert "\nboth   absent-a is missing: pip install 'collapsediag[both]'\n" in out
    assert not re.search(r"^test ", out, re.MULTILINE), "what the project's own tests need is nobody else's business"
    assert "self-test: skipped" in out


def test_what_is_too_old_is_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, REQUIREMENTS)
    assert main(["doctor"]) == 1
    have = metadata.version("pytest")
    assert f"\nold    pytest {have} is older than 999.1: pip install 'collapsediag[old]'\n" in capsys.readouterr().out


def test_the_extras_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    names = re.findall(r"^([\w-]+) = \[", text.split("[project.scripts]")[0], re.MULTILINE)
    lines = metadata.requires("collapsediag") or []
    # An editable installation knows the extras of the day it was made.
    assert {"hf", "gguf"} <= set(doctor.extra_names(lines)) <= set(names) - set(doctor.DEVELOPMENT_EXTRAS)
    found = {package.name: package.minimum for package in doctor.packages(lines, "gguf")}
    assert found == {"torch": "2.4", "transformers": "4.53", "gguf": "0.10", "accelerate": "1.0"}


def test_a_package_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", requires)
    assert main(["doctor"]) == 2
    assert re.search(r"error: collapsediag is imported from .*collapsediag but not installed", capsys.readouterr().err)
