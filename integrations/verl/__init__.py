"""Diagnostics inside veRL's PPO trainers: `attach(trainer)`, or no code at all (see `plugin` and `__main__`).

Nothing of veRL, and nothing heavy of ours, is imported before a trainer is observed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapsediag.integrations.verl.hook import CollapseHook, attach

__all__ = ["SECTION", "CollapseHook", "attach"]

SECTION = "collapsediag"  # of a veRL config


def __getattr__(name: str) -> Any:
    if name not in __all__[1:]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from collapsediag.integrations.verl import hook

    return getattr(hook, name)
