"""The package as people get it: what the wheel holds, what an import costs, and which way the imports point."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

import collapsediag

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *, cwd: Path | None = None, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    env = None if path is None else {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, env=env, check=False)


def modules_on_disk() -> set[str]:
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in [*(ROOT / "collapsediag").rglob("*.py"), *(ROOT / "collapsediag" / "integrations").rglob("*.py")]
        if "__pycache__" not in file.parts
    }


def test_importing_the_package_loads_nothing_heavy() -> None:
    done = run_python(
        """
        import sys
        import collapsediag, collapsediag.integrations
        dir(collapsediag)
        heavy = {"torch", "transformers", "pyarrow", "rich", "wandb", "tensorboard", "trl", "verl", "pandas"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_resolves_and_is_documented() -> None:
    for name in collapsediag.__all__:
        value = getattr(collapsediag, name)
        if name != "__version__":
            assert value.__doc__, name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Moniter'.*Monitor"):
        collapsediag.Moniter  # noqa: B018


def test_the_adapters_folder_refuses_any_other_name() -> None:
    done = run_python("import integrations", cwd=ROOT)
    assert "was imported as 'integrations'" in done.stderr


def test_the_changelog_tells_of_this_version() -> None:
    assert f"\n## {collapsediag.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_list_is_complete() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    packages = {name for name in modules_on_disk() if (ROOT / Path(*name.split(".")) / "__init__.py").exists()}
    missing = [
        name for name in sorted(packages) if f'\n    "{name}",' not in text.split("packages = [")[1].split("]")[0]
    ]
    assert missing == []


def data_on_disk() -> set[str]:
    folders = [ROOT / "collapsediag", ROOT / "integrations"]
    files = [f.relative_to(ROOT) for folder in folders for f in folder.rglob("*") if f.is_file() and f.suffix != ".py"]
    return {
        str(file).replace("integrations/", "collapsediag/integrations/", 1)
        if file.parts[0] == "integrations"
        else str(file)
        for file in files
        if "__pycache__" not in file.parts
    }


def test_a_wheel_built_from_the_source_archive_holds_everything_and_works_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("build")
    # A copy: building in place would pick up what an earlier build left in build/.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "runs"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "absent from the `packages` configuration" not in done.stdout + done.stderr
    (archive_path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive_path) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"} <= packed
    assert not [name for name in packed if name.startswith(("tests", "docs", "benchmarks"))]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[1] == collapsediag.__version__
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
        names = set(archive.namelist())
    held = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names if name.endswith(".py")
    }
    assert held == modules_on_disk()
    assert {name for name in names if ".dist-info/" not in name and not name.endswith(".py")} == data_on_disk()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    adapters = sorted(name for name in held if name.startswith("collapsediag.integrations"))
    done = run_python(
        f"""
        import importlib, collapsediag
        assert collapsediag.__file__.startswith({str(target)!r}), collapsediag.__file__
        for name in {adapters!r}:
            importlib.import_module(name)
        print("fine")
        """,
        cwd=tmp_path,
        path=target,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_every_module_says_what_it_is() -> None:
    for name in sorted(modules_on_disk()):
        if name.endswith("__main__") or name.startswith("collapsediag.scoring") or name.startswith("collapsediag.demo"):
            continue
        assert importlib.import_module(name).__doc__, name
