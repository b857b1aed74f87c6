"""Which trainer a callback belongs to. Callbacks of transformers are not told, but the trainer is up the stack."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from collapsediag.errors import SettingsError


def trainer_of(callback: Any) -> Any:
    """The transformers.Trainer that is calling `callback` right now. Raises SettingsError where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        handler = getattr(candidate, "callback_handler", None)
        if any(known is callback for known in getattr(handler, "callbacks", ())):
            return candidate
        frame = frame.f_back
    raise SettingsError(
        f"{type(callback).__name__} was called by something that is no transformers.Trainer. In your own loop call "
        "Monitor.observe(step, batch)."
    )
