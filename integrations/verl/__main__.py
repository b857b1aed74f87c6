"""veRL's own training command with the diagnostics switched on:

    python -m collapsediag.integrations.verl data.train_files=... actor_rollout_ref.model.path=... +collapsediag.every=5

Everything is passed on to `verl.trainer.main_ppo`. The config is checked here, before Ray starts.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from collapsediag._optional import require
from collapsediag.errors import SettingsError
from collapsediag.integrations.verl import SECTION, plugin
from collapsediag.integrations.verl.facts import check_config
from collapsediag.integrations.verl.settings import settings_of

HOOK = "ray_kwargs.ray_init.runtime_env.worker_process_setup_hook"


def with_our_overrides(arguments: list[str]) -> list[str]:
    """The command line, with the plug-in loaded in every process of the job, and diagnostics on where nothing is set.

    >>> with_our_overrides(["trainer.nnodes=1", "+collapsediag.every=5"])[2:]
    ['+ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=collapsediag.integrations.verl.plugin.setup']
    """
    ours = [f"+{HOOK}={plugin.__name__}.{plugin.setup.__name__}"]
    if not any(argument.lstrip("+").startswith(SECTION) for argument in arguments):
        ours.append(f"+{SECTION}.every=10")
    return [*arguments, *ours]


def checked(run: Any) -> Any:
    """`run_ppo` that looks at our section first, and ends with one line where it is wrong."""

    @functools.wraps(run)
    def run_checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            check_config(settings_of(config), config)
        except SettingsError as error:
            sys.exit(f"error: {error}")
        return run(config, *args, **kwargs)

    return run_checked


def main() -> None:
    """Run `verl.trainer.main_ppo`."""
    main_ppo: Any = require("verl.trainer.main_ppo", extra="verl", feature="the veRL front door")
    main_ppo.run_ppo = checked(main_ppo.run_ppo)
    sys.argv[1:] = with_our_overrides(sys.argv[1:])
    main_ppo.main()


if __name__ == "__main__":
    main()
