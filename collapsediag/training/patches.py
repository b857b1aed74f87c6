"""Replace methods on one object, and put them back without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class InstancePatches:
    """Wrappers around methods of one object; its class, and other objects of it, stay as they are.

    >>> class Counter:
    ...     def add(self, n): return n + 1
    >>> counter, patches = Counter(), InstancePatches()
    >>> patches.wrap(counter, "add", lambda original, n: 10 * original(n))
    >>> counter.add(1)
    20
    >>> patches.undo(counter)
    >>> counter.add(1), vars(counter)
    (2, {})
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[Any, Any]] = {}

    def wrap(self, target: Any, name: str, around: Callable[..., Any]) -> None:
        """Calls of `target.name(...)` become `around(original, ...)`."""
        original = getattr(target, name)
        wrapper = functools.wraps(original)(functools.partial(around, original))
        self._before[name] = (vars(target).get(name), wrapper)
        vars(target)[name] = wrapper

    def undo(self, target: Any) -> None:
        """Take the wrappers off again. One that somebody else has wrapped in the meantime stays under theirs."""
        for name, (before, wrapper) in self._before.items():
            if vars(target).get(name) is wrapper:
                if before is None:
                    del vars(target)[name]
                else:
                    vars(target)[name] = before
        self._before.clear()
