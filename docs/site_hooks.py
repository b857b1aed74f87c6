"""Site build: the changelog lies at the top of the repository and is shown as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_files(files: Any, config: Any) -> Any:
    """Add CHANGELOG.md to the pages."""
    from mkdocs.structure.files import File

    text = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text(encoding="utf-8")
    # Its links start at the top of the repository, those of a page in docs/.
    files.append(File.generated(config, "changelog.md", content=text.replace("](docs/", "](")))
    return files
