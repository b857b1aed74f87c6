"""What is fuzzed: each target takes bytes and must come back, with nothing raised but the library's own errors.

Bytes become text by `text_of`: below 0x80 a character, above an entry of a dictionary, so that a fuzzer that knows
nothing of tags and JSON finds them. The short version is tests/test_fuzz.py, the campaign benchmarks/fuzz.py.
"""

from __future__ import annotations

import contextlib
import html.parser
import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

import collapsediag as cd
from collapsediag.errors import CollapsediagError
from collapsediag.metrics.answers import final_answer, normalize_answer
from collapsediag.metrics.format import TagFormat
from collapsediag.metrics.format_json import JsonFormat, ToolFormat
from collapsediag.metrics.tool_parsers import result_is_error, split_output
from collapsediag.plain_text import printable
from collapsediag.readers import SOURCES, read_rollouts
from collapsediag.report.page import page_html
from collapsediag.report.payload import scored_payload, series_payload
from collapsediag.report.tail import RecordTail
from collapsediag.run_folder import RunStore, read_records
from collapsediag.spans import SpanFinder, find_reasoning
from collapsediag.testing import planted

DATA = Path(__file__).parent / "data" / "rollouts"
FOLDERS = Path("/dev/shm") if Path("/dev/shm").is_dir() else None

FRAGMENTS = (
    "<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<information>", "</information>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<function=f>", "</function>", "<function=",
    "<parameter=a>", "</parameter>", '{"name": "f", "arguments": {}}', "<|im_end|>", "<|im_start|>", "</s>", "<eos>",
    "\\boxed{", "{", "}", "[", "]", '"', ",", ":", '{"', '": "', '", "', '"}', "\n", "\n\n", "\\", "\\u0000", "\\ud800",
    '"step": 1', '"step": 2', '"input": ', '"output": ', '"gts": ', '"score": ', '"prompt": ', '"completion": ',
    '"messages": [', '"role": "assistant"', '"role": "user"', '"content": ', '"reward": ', '"group": ', '"tokens": ',
    '"masks": ', '"turns": [', '"tool_calls": [', '"type": "function_call"', "null", "true", "false", "NaN", "Infinity",
    "1e999", "-1", "0", "1", "9" * 25, "1,234.50", "1/0", "Error:", "Traceback (most recent call last)", "\x1b[31m",
    "\x1b]0;", "\u202e", "\u2028", "\ud800", "\ufeff", "\x00", "\r", "\t", " " * 8, "é", "漢", "\U0001f600", "<script>",
    "</script>", "<!--", "javascript:", "@@DATA@@", "%s%n", "{0.__class__}", "../../", "a" * 40, "the the ", "_1_2",
    '"values": {', '"namespace": "first_turn"', '"row": 0', '"own": 1', '"best": 7', '"logp_P": [-1.0, null]',
    '"pmi": ', '"notes": [', '"status": "failed"', '"not_measured": {',
)  # fmt: skip


def text_of(data: bytes) -> str:
    """The text that the bytes stand for."""
    return "".join(chr(b) if b < 0x80 else FRAGMENTS[(b - 0x80) % len(FRAGMENTS)] for b in data)


def halves(data: bytes) -> tuple[str, str]:
    """Two texts, cut where the first byte says."""
    cut = 1 + (data[0] * (len(data) - 1)) // 256 if data else 0
    return text_of(data[1:cut]), text_of(data[cut:])


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="collapsediag-fuzz-", dir=FOLDERS))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def edited(seed: bytes, data: bytes) -> bytes:
    """The seed with an edit for every four bytes: place (two bytes), length of what goes, what comes instead."""
    made = bytearray(seed)
    for i in range(0, len(data) - 3, 4):
        at = (data[i] * 256 + data[i + 1]) * (len(made) + 1) // 65536
        length = data[i + 2] if data[i + 2] < 0xF0 else (data[i + 2] - 0xF0) * 1024
        made[at : at + length] = text_of(data[i + 3 : i + 4]).encode("utf-8", "surrogatepass")
    return bytes(made)


# -- targets ---------------------------------------------------------------------------------------------------------


@cache
def saved_rollouts() -> tuple[bytes, ...]:
    """The first rows of each saved file that is small, and rows of our own schema."""
    files = sorted(file for file in DATA.rglob("*") if file.suffix in (".jsonl", ".json"))
    heads = [b"".join(file.read_bytes().splitlines(keepends=True)[:3])[:20_000] for file in files]
    ours = [
        {"step": 1, "prompt": "a", "output": "<think>b</think>c", "reward": 1, "prompt_ids": [1, 2], "output_ids": [3]},
        {"step": 1, "turns": [{"context": "a", "output": "b", "observation": "c", "tool_calls": [{"name": "f"}]}]},
        {"step": 2, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    ]  # fmt: skip
    return (b"".join(json.dumps(row).encode() + b"\n" for row in ours), *heads)


def readers(data: bytes) -> None:
    """Saved files, damaged: found out what they are, read, and measured."""
    seeds = saved_rollouts()
    content = text_of(data[1:]).encode("utf-8", "surrogatepass")
    if data and data[0] % 8:
        content = edited(seeds[data[0] % len(seeds)], data[1:])
    with folder() as path:
        file = path / "dump.jsonl"
        file.write_bytes(content)
        name = sorted(SOURCES)[data[0] % len(SOURCES)] if len(data) % 3 == 0 and data else None
        with contextlib.suppress(CollapsediagError):
            for batch in read_rollouts(file, source=name, skip_bad_lines=len(data) % 2 == 0):
                assert len(batch) > 0 or batch.dropped
                assert all(math.isfinite(value) for value in cd.rollout_metrics(batch).values())


class Characters:
    """A tokenizer of one token a character."""

    def decode(self, ids: object) -> str:
        return "".join(map(chr, np.asarray(ids).tolist()))


def spans(data: bytes) -> None:
    """Reasoning spans in text and in tokens of one character each: the same."""
    context, output = halves(data)
    found = find_reasoning(output, context=context)
    assert 0 <= found.start <= found.stop <= len(output)
    assert "</think>" not in output[found.start : found.stop]
    find_reasoning(output)
    in_tokens = SpanFinder(Characters()).find(list(map(ord, output)), [])
    in_text = find_reasoning(output, context="")
    assert (in_tokens.status, in_tokens.start, in_tokens.stop) == (in_text.status, in_text.start, in_text.stop)


FORMATS = (
    TagFormat(),
    TagFormat(actions=("search", "answer")),
    JsonFormat({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}),
    JsonFormat({}, tag="answer"),
    ToolFormat({"f": {"type": "object", "properties": {"a": {"enum": [1, None, "x"]}}}}),
)


def formats(data: bytes) -> None:
    """Formats name a declared failure or none; an answer is part of the output, and has a spelling without space."""
    context, output = halves(data)
    for form in FORMATS:
        (failure,) = form.failures([output], [context])
        assert failure is None or failure in form.failure_names
    answer = final_answer(output)
    if answer is not None:
        assert answer in output
        assert not set(normalize_answer(answer)) & set(" \n\t")


def tools(data: bytes) -> None:
    """Tool calls and results, and the metrics of a rollout that holds them."""
    context, output = halves(data)
    segments = split_output(output)
    kept = re.sub(r"\s", "", "".join(segment.text for segment in segments))
    assert re.sub(r"</?(?:tool_call|search|information|tool_response)>|\s", "", output) == re.sub(
        r"</?(?:tool_call|search|information|tool_response)>", "", kept
    )
    result_is_error(output)
    turns = (
        cd.Turn(context=context, output=output, observation=context[::-1]),
        cd.Turn(context=context + output + context[::-1], output=output),
    )
    batch = cd.RolloutBatch(step=0, rollouts=(cd.Rollout(turns=turns, group=context, reward=1.0),))
    assert all(math.isfinite(value) for value in cd.rollout_metrics(batch).values())


@cache
def recorded_run() -> Path:
    """A small run folder with traces; made once."""
    path = Path(tempfile.mkdtemp(prefix="collapsediag-fuzz-seed-", dir=FOLDERS))
    p = planted("healthy", n_contexts=3, group_size=2, length=2)
    with cd.Monitor(p.scorer(), every=2, reasoning="completion", sinks=[cd.JsonlSink(path)]) as monitor:
        for step in range(4):
            monitor.observe(step, p.batch)
    return path


def tail(data: bytes) -> None:
    """A file of records that grows in pieces, as the reader that follows it and the one that reads it once see it."""
    seed = (recorded_run() / "metrics.jsonl").read_bytes()
    content = edited(seed, data[2:])
    with folder() as path:
        followed = RecordTail(path)
        pieces = 1 + (data[0] % 8 if data else 0)
        for i in range(pieces):
            start, stop = len(content) * i // pieces, len(content) * (i + 1) // pieces
            with open(path / "metrics.jsonl", "ab") as stream:
                stream.write(content[start:stop])
            followed.poll()
        with open(path / "metrics.jsonl", "ab") as stream:
            stream.write(b"\n")
        followed.poll()
        with RunStore(path, resume=True):
            assert [r.to_json() for r in followed.records] == [r.to_json() for r in read_records(path)]


class Tags(html.parser.HTMLParser):
    """The elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


@cache
def tags_of_the_page() -> tuple[str, ...]:
    path = recorded_run()
    return tuple(Tags(page_html([series_payload(path)], [[scored_payload(path, 0)]])).found)


def page(data: bytes) -> None:
    """A run folder with anything in it becomes a page with the same elements, or an error of ours."""
    seed = recorded_run()
    which = ("metrics.jsonl", "traces/000000000.jsonl", "matrices/000000000-first_turn.npz", "run.json")
    with folder() as path:
        shutil.copytree(seed, path / "run")
        file = path / "run" / which[data[0] % 4 if data else 0]
        file.write_bytes(edited(file.read_bytes(), data[1:]))
        try:
            series = series_payload(path / "run", name=text_of(data[1:40]))
            scored = [scored_payload(path / "run", step) for step in series["scored_steps"][:1]]
        except CollapsediagError as error:
            printable(str(error)).encode("ascii", "backslashreplace")
            return
        made = page_html([series], [scored])
    made.encode("utf-8")
    assert len(Tags(made).found) - len(tags_of_the_page()) in (0, -1)  # -1: no scored step, so no block for it


TARGETS: dict[str, Callable[[bytes], None]] = {
    "readers": readers,
    "spans": spans,
    "formats": formats,
    "tools": tools,
    "tail": tail,
    "page": page,
}


def quiet() -> None:
    """Warnings about damaged lines are meant."""
    logging.getLogger("collapsediag").setLevel(logging.CRITICAL)
