"""The dormant plug-in: waits for veRL's trainers to be imported, and acts only where the config has our section.

Three ways to load it, all without code: `VERL_USE_EXTERNAL_MODULES=collapsediag.integrations.verl.plugin`, the entry
point of group `verl.plugins` that comes with the package (veRL 0.9), or Ray's `worker_process_setup_hook`.

Loading it imports the standard library only.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from collapsediag.integrations.verl import SECTION

# Where trainers are, and the method after which their workers stand: the new trainer of 0.9, and the one before it.
TRAINERS = {
    "verl.trainer.ppo.v1.trainer_base": ("PPOTrainer", "init"),
    "verl.trainer.ppo.ray_trainer": ("RayPPOTrainer", "init_workers"),
}


class TrainerImports(MetaPathFinder):
    """Calls `after(module)` once, right after one of `names` has been imported; finds nothing itself."""

    def __init__(self, names: set[str], after: Callable[[Any], None]) -> None:
        self._waiting = set(names)
        self._after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the other finders give, with a loader that tells us."""
        if name not in self._waiting:
            return None
        self._waiting.discard(name)  # while the other finders are asked
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._waiting.add(name)  # to ask for a spec is not to import
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if name in self._waiting:
                self._waiting.discard(name)
                self._after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch(module: Any) -> None:
    """Let trainers of this module be observed once their workers stand, if their config asks for it."""
    class_name, method = TRAINERS[module.__name__]
    trainer_class = getattr(module, class_name)
    original = getattr(trainer_class, method)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.get(SECTION) is None:
            return original(self, *args, **kwargs)
        from collapsediag.integrations.verl.facts import check_config
        from collapsediag.integrations.verl.hook import CollapseHook
        from collapsediag.integrations.verl.settings import settings_of

        hook = CollapseHook(settings_of(self.config))
        check_config(hook.settings, self.config)  # before any model is loaded: a wrong setting shows at once
        result = original(self, *args, **kwargs)
        hook.bind(self)
        return result

    setattr(trainer_class, method, wrapper)


def setup() -> None:
    """For Ray's `worker_process_setup_hook`; importing this module has done it already."""


def _install() -> None:
    for name in TRAINERS:
        if name in sys.modules:
            watch(sys.modules[name])
    waiting = {name for name in TRAINERS if name not in sys.modules}
    sys.meta_path.insert(0, TrainerImports(waiting, watch))


_install()
