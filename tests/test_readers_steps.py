"""Steps: their order, steps that come back, samples of large steps, and memory."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from collapsediag.errors import ReaderError
from collapsediag.readers import from_jsonl, from_verl, read_rollouts
from collapsediag.rollouts import RolloutBatch


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
    return path


def row(step: int | None, text: str, group: str | int = "g") -> dict[str, Any]:
    made: dict[str, Any] = {"prompt": f"prompt {group}", "group": group, "completion": text, "reward": 0.0}
    return made if step is None else {"step": step, **made}


def outputs(batch: RolloutBatch) -> list[str | None]:
    return [rollout.turns[0].output for rollout in batch]


# --- order and repetition ---------------------------------------------------------------------------------------------


def test_steps_come_in_order_whatever_the_files_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [row(5, "5"), row(7, "7")])
    write(tmp_path / "a.jsonl", [row(6, "6"), row(6, "6'"), row(8, "8")])
    batches = list(from_jsonl(tmp_path))
    assert [(b.step, outputs(b)) for b in batches] == [(5, ["5"]), (6, ["6", "6'"]), (7, ["7"]), (8, ["8"])]


def test_the_last_attempt_at_a_step_wins_after_a_resume(tmp_path: Path) -> None:
    first = [row(step, f"first {step}") for step in range(1, 11) for _ in "ab"]
    resumed = [row(step, f"resumed {step}") for step in (9, 10, 11) for _ in "ab"]
    batches = list(from_jsonl(write(tmp_path / "a.jsonl", first + resumed)))
    assert [b.step for b in batches] == list(range(1, 12))
    assert [outputs(b)[0] for b in batches] == [f"first {s}" for s in range(1, 9)] + [
        f"resumed {s}" for s in (9, 10, 11)
    ]
    assert [b.dropped for b in batches] == [{}] * 8 + [{"superseded_step": 2}] * 2 + [{}]
    assert any("written more than once" in note for note in batches[8].notes)
    assert not any("written more than once" in note for note in batches[0].notes)


def test_a_second_attempt_that_ended_earlier_keeps_the_later_steps_of_the_first(tmp_path: Path) -> None:
    rows = [row(s, f"first {s}") for s in range(1, 8)] + [row(s, f"second {s}") for s in (3, 4)]
    batches = list(from_jsonl(write(tmp_path / "a.jsonl", rows)))
    expected = ["first 1", "first 2", "second 3", "second 4", "first 5", "first 6", "first 7"]
    assert [outputs(b) for b in batches] == [[text] for text in expected]


def test_shards_in_one_file_are_asked_about(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(s, f"rank {r}") for r in range(3) for s in (1, 2)])
    with pytest.raises(ReaderError, match=r"steps come back 2 times.*would drop 4 of 6 rollouts.*repeated_steps"):
        list(from_jsonl(path))
    assert [outputs(b) for b in from_jsonl(path, repeated_steps="merge")] == [["rank 0", "rank 1", "rank 2"]] * 2
    assert [outputs(b) for b in from_jsonl(path, repeated_steps="last")] == [["rank 2"]] * 2


def test_one_step_in_two_files_is_asked_about(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [row(1, name), row(2, name)]) for name in "ab"]
    with pytest.raises(ReaderError, match=r"step 1 is in two files, .*a.jsonl and .*b.jsonl"):
        list(from_jsonl(paths))
    assert [outputs(b) for b in from_jsonl(paths, repeated_steps="merge")] == [["a", "b"], ["a", "b"]]
    last = list(from_jsonl(paths, repeated_steps="last"))
    assert [outputs(b) for b in last] == [["b"], ["b"]]
    assert [b.dropped for b in last] == [{"superseded_step": 1}] * 2


def test_files_without_steps_are_one_step(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [row(None, name)]) for name in "ab"]
    [batch] = from_jsonl(paths)
    assert (batch.step, outputs(batch)) == (0, ["a", "b"])
    assert any("no step is stated" in note for note in batch.notes)


def test_a_step_in_the_name_of_the_file_counts_where_rows_have_none(tmp_path: Path) -> None:
    for step in (3, 12):
        write(tmp_path / f"step_{step}.jsonl", [row(None, str(step))])
    assert [(b.step, outputs(b)) for b in from_jsonl(tmp_path)] == [(3, ["3"]), (12, ["12"])]


def test_a_step_stated_in_some_rows_only_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReaderError, match=r"line 2: some rows state a step \(.*line 1\) and some do not \(.*line 2\)"):
        list(from_jsonl(write(tmp_path / "a.jsonl", [row(1, "a"), row(None, "b")])))


def test_rows_that_were_written_after_the_index_was_made_wait(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(1, "a"), row(2, "b")])
    reading = from_jsonl(path)
    assert outputs(next(reading)) == ["a"]
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row(2, "b'")) + "\n" + json.dumps(row(3, "c")) + "\n")
    assert [(b.step, outputs(b)) for b in reading] == [(2, ["b", "b'"])]


# --- sampling ---------------------------------------------------------------------------------------------------------


def shuffled(groups: int, size: int) -> list[dict[str, Any]]:
    """Rows of `groups` groups, spread over the file so that no group is contiguous."""
    return [row(1, f"{g}/{i}", g) for i in range(size) for g in range(groups)]


@pytest.mark.parametrize(("limit", "expected"), [({"max_groups": 5}, 20), ({"max_rollouts": 22}, 20)])
def test_whole_groups_are_drawn_and_the_rest_is_counted(tmp_path: Path, limit: dict[str, int], expected: int) -> None:
    path = write(tmp_path / "a.jsonl", shuffled(40, 4))
    [batch] = from_jsonl(path, **limit)
    sizes = [len(v) for v in batch.groups().values()]
    assert set(sizes) == {4}
    assert len(batch) == expected
    assert batch.dropped == {"not_sampled": 160 - len(batch)}
    assert any(f"kept {len(batch)} of 160 rollouts" in note for note in batch.notes)
    order = [int((text or "").split("/")[1]) * 40 + int((text or "").split("/")[0]) for text in outputs(batch)]
    assert order == sorted(order), "rows must keep the order of the file"


def test_the_sample_depends_on_the_seed_alone_not_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = shuffled(40, 4)
    forward = write(tmp_path / "a.jsonl", rows)
    backward = write(tmp_path / "b.jsonl", rows[::-1])

    def drawn(path: Path, seed: int) -> set[str | int]:
        [batch] = from_jsonl(path, max_groups=5, seed=seed)
        return set(batch.groups())

    assert drawn(forward, 0) == drawn(forward, 0) == drawn(backward, 0)
    assert len({frozenset(drawn(forward, seed)) for seed in range(10)}) > 5


def test_every_group_is_drawn_equally_often(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", shuffled(10, 2))
    draws = 400
    seen: Counter[str | int] = Counter()
    for seed in range(draws):
        [batch] = from_jsonl(path, max_groups=3, seed=seed)
        seen.update(list(batch.groups()))
    # Binomial(400, 0.3): 5 standard deviations hold for all ten groups at once but for about one seed set in 10^5.
    bound = 5 * math.sqrt(draws * 0.3 * 0.7)
    assert all(abs(seen[group] - 0.3 * draws) < bound for group in range(10)), seen


def test_a_group_too_large_by_itself_is_thinned(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(1, str(i)) for i in range(100)])
    [batch] = from_jsonl(path, max_rollouts=7)
    assert len(batch) == 7
    assert batch.dropped == {"not_sampled": 93}
    [other] = from_jsonl(path, max_rollouts=7, seed=1)
    assert outputs(batch) != outputs(other)
    # Not simply the first or the last rows.
    assert max(int(text or 0) for text in outputs(batch)) > 7
    assert min(int(text or 0) for text in outputs(batch)) < 93


def test_one_rollout_is_always_kept(tmp_path: Path) -> None:
    [batch] = from_jsonl(write(tmp_path / "a.jsonl", [row(1, "x" * 1000, g) for g in range(5)]), max_step_bytes=10)
    assert len(batch) == 1


def test_the_limit_in_bytes_is_used_up(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(1, "x" * 1000, g) for _ in "ab" for g in range(50)])
    line = path.stat().st_size / 100
    [batch] = from_jsonl(path, max_step_bytes=int(20.5 * line))
    assert len(batch) == 20
    assert len(batch.groups()) == 10


def test_limits_hold_for_each_step_by_itself(tmp_path: Path) -> None:
    rows = [row(step, f"{g}", g) for step in (1, 2, 3) for g in range(20)]
    batches = list(from_jsonl(write(tmp_path / "a.jsonl", rows), max_groups=4))
    assert [len(b) for b in batches] == [4, 4, 4]
    # Other steps, other groups: a run is not watched through the same four prompts.
    assert len({frozenset(b.groups()) for b in batches}) > 1


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_of_reading(path: Path, **options: Any) -> tuple[int, list[tuple[int, int]]]:
    """(peak of traced memory in bytes, (step, rollouts) of each batch); batches are let go as they come."""
    tracemalloc.start()
    seen = []
    for batch in read_rollouts(path, **options):
        seen.append((batch.step, len(batch)))
        del batch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, seen


def write_large(path: Path, megabytes: int, steps: int | None) -> int:
    """A file of about so many MB; returns its rows."""
    rows = megabytes * 100
    text = "some reasoning that goes on and on. " * 280
    made = (row(None if steps is None else i * steps // rows, f"{i} {text}", i // 8) for i in range(rows))
    write(path, made)
    return rows


def test_memory_is_bounded_by_one_step_small(tmp_path: Path) -> None:
    """The same as below on 12 MB, so that the default run sees it too."""
    rows = write_large(tmp_path / "a.jsonl", 12, steps=40)
    peak, seen = peak_of_reading(tmp_path / "a.jsonl")
    assert sum(n for _, n in seen) == rows
    assert [step for step, _ in seen] == list(range(40))
    assert peak < 3 * 2**20


@pytest.mark.slow
def test_memory_is_bounded_by_one_step(tmp_path: Path) -> None:
    rows = write_large(tmp_path / "a.jsonl", 100, steps=100)
    assert (tmp_path / "a.jsonl").stat().st_size > 100 * 10**6
    peak, seen = peak_of_reading(tmp_path / "a.jsonl")
    assert sum(n for _, n in seen) == rows
    assert peak < 8 * 2**20, f"a step is 1 MB of 100; the peak was {peak / 2**20:.1f} MB"


@pytest.mark.slow
def test_memory_is_bounded_by_the_limit_where_the_file_is_one_step(tmp_path: Path) -> None:
    rows = write_large(tmp_path / "a.jsonl", 100, steps=None)
    peak, [(step, kept)] = peak_of_reading(tmp_path / "a.jsonl", max_step_bytes=4 * 2**20)
    assert (step, kept < rows) == (0, True)
    assert 200 < kept < 500
    assert peak < 16 * 2**20, f"4 MB may be kept; the peak was {peak / 2**20:.1f} MB"
    peak, [(step, kept)] = peak_of_reading(tmp_path / "a.jsonl", max_groups=4)
    assert kept == 32
    assert peak < 8 * 2**20


def test_a_folder_of_verl_files_is_read_one_at_a_time(tmp_path: Path) -> None:
    text = "x" * 20_000
    for step in range(30):
        rows = [{"input": f"q{i % 4}", "output": f"{i}{text}", "score": 0.0, "step": step} for i in range(16)]
        write(tmp_path / f"{step}.jsonl", rows)
    tracemalloc.start()
    assert sum(len(batch) for batch in from_verl(tmp_path)) == 480
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 2**20, f"the folder holds 9.6 MB, one file 0.3; the peak was {peak / 2**20:.1f} MB"
