"""Numbers on their way into veRL's log: `Tracking.log` is wrapped once, whatever trainer or logger calls it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping
from typing import Any, Protocol

# Records of training steps have one of these; those of validation before training have not.
STEP_KEYS = ("training/global_step", "actor/pg_loss", "critic/score/mean")


class Pending(Protocol):
    """Something with numbers for the next line."""

    def merge_into(self, data: MutableMapping[str, Any]) -> None:
        """Add them. Must not raise, and must leave alone what is there."""
        ...


_pending: weakref.WeakSet[Any] = weakref.WeakSet()
_MARK = "collapsediag_wrapper"


def add(pending: Pending) -> None:
    """From now on `pending` is asked at every training step's line; held weakly."""
    from verl.utils.tracking import Tracking

    _pending.add(pending)
    # The mark shows through wrappers that others have put around ours.
    if not hasattr(Tracking.log, _MARK):
        Tracking.log = _merging(Tracking.log)


def remove(pending: Pending) -> None:
    """Undo `add`. With the last one `Tracking.log` is what it was, unless somebody has wrapped it since."""
    from verl.utils.tracking import Tracking

    _pending.discard(pending)
    ours, original = getattr(Tracking.log, _MARK, (None, None))
    if not _pending and ours is Tracking.log:
        Tracking.log = original


def _merging(original: Any) -> Any:
    @functools.wraps(original)
    def log(self: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        if any(key in data for key in STEP_KEYS):
            data = dict(data)  # the trainer's own stays as it is
            for pending in list(_pending):
                pending.merge_into(data)
        return original(self, data, step, *args, **kwargs)

    setattr(log, _MARK, (log, original))
    return log
