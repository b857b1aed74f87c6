"""The docs say what the code does: generated pages are current, examples run, links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import collapsediag as cd

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
# A block that cannot run here (a GPU, a trainer's job) is marked `<!-- not run: why -->` on the line before it.
FENCE = re.compile(r"(?P<mark><!-- not run: .+? -->\n)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_metrics_page_is_what_the_registry_says(generate: Any) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == generate.render(), "run python docs/generate.py"


def test_the_fault_table_is_what_the_tests_say(generate: Any) -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert page == generate.with_fault_table(page), "run python docs/generate.py"
    names = [what for what, _, _ in generate.faults()]
    assert len(names) == len(set(names)), "every fault has one test"


def test_the_table_of_rooms_names_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name.rstrip("/") for cell in rooms for name in re.findall(r"`([\w/]+)`", cell)}
    package = ROOT / "collapsediag"
    made = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert named == made - {"__init__", "__main__"}


def test_the_table_of_settings_names_every_argument_of_a_monitor() -> None:
    page = (ROOT / "docs" / "attach.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    parameters = inspect.signature(cd.Monitor).parameters.values()
    assert sorted(named) == sorted(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page run in order, in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        if block["mark"] is None:
            exec(compile(block["code"], str(page), "exec"), namespace)
