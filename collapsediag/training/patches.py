"""Replace methods on one object, and put them back without a trace."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


class InstancePatches:
    """Wrappers around methods of one object; its class, and other objects of it, stay as they are.

    Holds neither the object nor its methods alive.

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
        self._wrappers: dict[str, tuple[weakref.ref[Any], bool]] = {}

    def wrap(self, target: Any, name: str, around: Callable[..., Any]) -> None:
        """Calls of `target.name(...)` become `around(original, ...)`."""
        original = getattr(target, name)
        wrapper = functools.wraps(original)(functools.partial(around, original))
        self._wrappers[name] = weakref.ref(wrapper), name in vars(target)
        vars(target)[name] = wrapper

    def undo(self, target: Any) -> None:
        """Take the wrappers off again. One that somebody else has wrapped in the meantime stays under theirs."""
        for name, (reference, was_own) in self._wrappers.items():
            wrapper = reference()
            if wrapper is None or vars(target).get(name) is not wrapper:
                continue
            if was_own:
                vars(target)[name] = wrapper.__wrapped__
            else:
                del vars(target)[name]
        self._wrappers.clear()
