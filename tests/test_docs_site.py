"""The site: every page is in the navigation, and the messages in the troubleshooting pages are the code's own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Added when the site is built.
GENERATED = {"changelog.md"}


def navigation() -> list[str]:
    """Pages named in mkdocs.yml, without a YAML parser: a page ends its line."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    return re.findall(r"^ .*?([\w/-]+\.md)$", text, re.MULTILINE)


def test_the_navigation_holds_every_page_once() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | GENERATED
    assert sorted(navigation()) == sorted(pages)


def strings_of_the_code() -> list[str]:
    """Every text in the code, with ... where a value is filled in."""
    found = []
    for file in [*(ROOT / "collapsediag").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.append("".join(map(str, parts)))
    return found


def messages(page: Path) -> list[str]:
    """The quoted messages in the first column of the tables of messages and reasons."""
    tables = re.findall(r"^\| (?:message|reason) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text("utf-8"), re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.parametrize("name", ["troubleshooting.md", "adapters/wandb.md"])
def test_quoted_messages_are_raised_somewhere(name: str) -> None:
    quoted = messages(DOCS / name)
    assert len(quoted) >= 3
    # %d and %s of log lines are filled in as well.
    known = [re.sub(r"%[-.\w]*[sdg]|\.\.\.", "\0", text) for text in strings_of_the_code()]
    for message in quoted:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
        pattern = re.compile(r"[\s\S]*".join(parts))
        assert any(pattern.search(text) for text in known), message
