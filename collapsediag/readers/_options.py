"""The settings every reader takes, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from collapsediag.errors import SettingsError

# What one step may hold in memory, counted in bytes of the file. A step that is larger is sampled by whole groups.
MAX_STEP_BYTES = 256 * 2**20

RepeatedSteps = Literal["auto", "last", "merge"]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a reader may be told.

    key_map: our name -> the file's name, for files with keys of their own: {"completion": "answer_text"}. The file's
        name may be a path into nested objects: {"reward": "metrics.public_reward"}.
    skip_bad_lines: read on after a line that cannot be read, and count it as dropped["bad_line"].
    max_groups, max_rollouts: keep at most so many of one step; whole groups are drawn, seeded, and what is left out is
        counted as dropped["not_sampled"]. None: no limit but max_step_bytes.
    max_step_bytes: the same limit in bytes of the file, so that a file without steps is never held whole.
    seed: decides which groups are drawn.
    repeated_steps: what a step that comes back means. "last": a resumed run, the last attempt wins. "merge": shards of
        one step, all rows count. "auto": the last attempt wins inside one file; where that would throw away half of
        the file, or where two files hold the same step, an error asks.
    wrap_questions: make a chat message of a prompt that is a bare question (default), or take it as the whole context.
    reward_weights: how a total reward is made of components where the file has only those; without it, their plain
        sum, and a note says so.
    check_groups: one group must have one prompt; two are an error. False where they differ on purpose.
    """

    key_map: Mapping[str, str] = field(default_factory=dict)
    skip_bad_lines: bool = False
    max_groups: int | None = None
    max_rollouts: int | None = None
    max_step_bytes: int = MAX_STEP_BYTES
    seed: int = 0
    repeated_steps: RepeatedSteps = "auto"
    wrap_questions: bool = True
    reward_weights: Mapping[str, float] | None = None
    check_groups: bool = True

    def __post_init__(self) -> None:
        for name in ("max_groups", "max_rollouts", "max_step_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}; give a positive number, or None for no limit.")
        if self.repeated_steps not in ("auto", "last", "merge"):
            raise SettingsError(f"repeated_steps is {self.repeated_steps!r}; it is one of 'auto', 'last', 'merge'.")


def make_options(options: Mapping[str, Any]) -> ReadOptions:
    """ReadOptions from keyword arguments; an unknown name is a SettingsError that lists the known ones.

    >>> make_options({"max_groups": 8}).max_groups
    8
    """
    known = [f.name for f in fields(ReadOptions)]
    for name in options:
        if name not in known:
            raise SettingsError(f"readers have no setting {name!r}; they have {', '.join(known)}.")
    return ReadOptions(**options)
