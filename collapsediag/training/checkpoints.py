"""What a checkpoint kept of the diagnostics. A run that is resumed does not end for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from collapsediag.plain_text import error_text, printable

logger = logging.getLogger("collapsediag")


def take_up(load: Callable[[], None]) -> None:
    """Load a checkpoint's state; where it is damaged, or of another release, say so and begin anew.

    >>> take_up(lambda: None)
    """
    try:
        load()
    except Exception as error:
        logger.warning(
            "the checkpoint's diagnostics state cannot be used (%s); moving averages begin anew",
            printable(f"{type(error).__name__}: {error_text(error)}"),
        )
