"""The one place that words a missing optional package."""

from __future__ import annotations

import importlib
from types import ModuleType

from collapsediag.errors import MissingExtraError


def require(module: str, *, extra: str, feature: str) -> ModuleType:
    """Import `module`, or say which `pip install` brings it.

    A module that is there but broken inside raises its own error: hiding it would send the user to the wrong cure.

    >>> require("json", extra="none", feature="this example").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        wanted = module.split(".")[0]
        if error.name is None or error.name.split(".")[0] != wanted:
            raise
        raise MissingExtraError(
            f"{feature} needs the package {wanted!r}, which is not installed.\n  pip install 'collapsediag[{extra}]'",
            name=error.name,
        ) from error
