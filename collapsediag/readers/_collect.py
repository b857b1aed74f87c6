"""The rollouts of one step, within limits: whole groups are drawn as they stream by, seeded, in bounded memory."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from collapsediag.readers._options import ReadOptions
from collapsediag.readers._rows import Row
from collapsediag.readers._source import Parsed, prompt_digests
from collapsediag.rollouts import Rollout, RolloutBatch


def _rank(*parts: object) -> int:
    """A number that looks random and depends on nothing but its arguments."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).digest(), "big")


class _Group:
    """The kept rollouts of one group, as a heap whose top is the next to go: (-rank, arrival, rollout, bytes)."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Rollout, int]] = []
        self.n_bytes = 0


class GroupSample:
    """Keeps the groups of lowest rank that fit into the limits.

    A group's rank is a hash of (seed, step, group), so that every set of groups is equally likely, rows of a group may
    come in any order, and a group once refused stays refused: no second pass and no list of all groups is needed. Only
    a single group too large by itself is thinned, by the same rule on its rows.
    """

    def __init__(self, options: ReadOptions, step: int) -> None:
        self.options = options
        self.step = step
        self.kept: dict[str | int, _Group] = {}
        self.n_kept = 0
        self.n_bytes = 0
        self.n_seen = 0
        self._order: list[tuple[int, int, str | int]] = []
        self._ceiling = 1 << 64

    def add(self, rollout: Rollout, n_bytes: int) -> bool:
        """Keep the rollout if its group is drawn so far; returns whether its group is."""
        self.n_seen += 1
        group = self.kept.get(rollout.group)
        if group is None:
            rank = _rank(self.options.seed, self.step, rollout.group)
            if rank >= self._ceiling:
                return False
            group = self.kept[rollout.group] = _Group()
            heapq.heappush(self._order, (-rank, self.n_seen, rollout.group))
        place = _rank(self.options.seed, self.step, rollout.group, self.n_seen)
        heapq.heappush(group.heap, (-place, self.n_seen, rollout, n_bytes))
        group.n_bytes += n_bytes
        self.n_bytes += n_bytes
        self.n_kept += 1
        while self._too_much():
            self._shrink()
        return rollout.group in self.kept

    def _too_much(self) -> bool:
        limits = self.options
        if limits.max_groups is not None and len(self.kept) > limits.max_groups:
            return True
        if self.n_kept <= 1:
            return False
        too_many = limits.max_rollouts is not None and self.n_kept > limits.max_rollouts
        return too_many or self.n_bytes > limits.max_step_bytes

    def _shrink(self) -> None:
        if len(self.kept) > 1:
            rank, _, name = heapq.heappop(self._order)
            self._ceiling = -rank
            gone = self.kept.pop(name)
            self.n_kept -= len(gone.heap)
            self.n_bytes -= gone.n_bytes
            return
        (group,) = self.kept.values()
        size = heapq.heappop(group.heap)[3]
        group.n_bytes -= size
        self.n_bytes -= size
        self.n_kept -= 1

    def rollouts(self) -> list[Rollout]:
        """What was kept, in the order of the file."""
        rows = [(arrival, rollout) for group in self.kept.values() for _, arrival, rollout, _ in group.heap]
        return [rollout for _, rollout in sorted(rows, key=lambda row: row[0])]


class StepCollector:
    """Gathers the parsed rows of one step into a RolloutBatch."""

    def __init__(self, options: ReadOptions, step: int, title: str) -> None:
        self.options = options
        self.step = step
        self.title = title
        self.sample = GroupSample(options, step)
        self.dropped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.batch: dict[str, Any] = {}
        self.paths: dict[str, None] = {}
        self._prompts: dict[str | int, tuple[dict[str, str], str]] = {}

    def add(self, parsed: Parsed, row: Row) -> None:
        """Take the rollouts of one row. Raises ReaderError where a group has two prompts."""
        if parsed.named_group and self.options.check_groups:
            for rollout in parsed.rollouts:
                self._check_prompt(rollout, row)
        self.paths.setdefault(row.path)
        self.dropped.update(parsed.dropped)
        self.notes.update(parsed.notes)
        for name, value in parsed.batch.items():
            if self.batch.setdefault(name, value) != value:
                self.notes[f"rows of this step differ in {name}; the first one's {self.batch[name]} is recorded"] += 1
        size = row.n_bytes // max(1, len(parsed.rollouts))
        for rollout in parsed.rollouts:
            if not self.sample.add(rollout, size):
                self._prompts.pop(rollout.group, None)

    def _check_prompt(self, rollout: Rollout, row: Row) -> None:
        prompt = prompt_digests(rollout.turns[0])
        first, where = self._prompts.setdefault(rollout.group, (prompt, row.where))
        # Only forms that both rows have can differ: one may carry token ids and the other text.
        if any(first[form] != prompt[form] for form in first.keys() & prompt.keys()):
            raise row.error(
                f"group {rollout.group!r} has another prompt here than in {where}. All rollouts of one group are "
                "samples of one prompt; the dump's ids or its rows are mixed up. If prompts of a group differ on "
                "purpose: check_groups=False (--no-check-groups)."
            )

    def finish(self, extra_dropped: Mapping[str, int], extra_notes: Sequence[str]) -> RolloutBatch:
        """The batch, with what was left out and what must be known."""
        rollouts = self._one_mode(self.sample.rollouts())
        self.dropped.update(extra_dropped)
        if self.sample.n_kept < self.sample.n_seen:
            self.dropped["not_sampled"] += self.sample.n_seen - self.sample.n_kept
        names = list(self.paths)
        return RolloutBatch(
            step=self.step,
            rollouts=tuple(rollouts),
            dropped=dict(self.dropped),
            source=f"{self.title}, {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
            notes=(*extra_notes, *self._limit_notes(), *(n.replace("{n}", str(c)) for n, c in self.notes.items())),
            **self.batch,
        )

    def _limit_notes(self) -> list[str]:
        seen, kept = self.sample.n_seen, self.sample.n_kept
        if kept == seen:
            return []
        options = self.options
        limits = {"max_groups": options.max_groups, "max_rollouts": options.max_rollouts}
        named = [f"{name}={value}" for name, value in limits.items() if value is not None]
        named.append(f"max_step_bytes={options.max_step_bytes}")
        return [
            f"kept {kept} of {seen} rollouts ({len(self.sample.kept)} whole groups, drawn with seed {options.seed}) "
            f"to stay within {', '.join(named)}"
        ]

    def _one_mode(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Training rollouts only, where a step also holds evaluation: their prompts and sampling are another thing."""
        modes = {rollout.metadata.get("mode") for rollout in rollouts}
        if len(modes) < 2 or "train" not in modes:
            return rollouts
        kept = [rollout for rollout in rollouts if rollout.metadata.get("mode") == "train"]
        self.dropped["not_training"] += len(rollouts) - len(kept)
        return kept
