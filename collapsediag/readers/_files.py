"""Open a file as rows: JSON lines, one JSON document or parquet; plain or gzip; and say what any other file is."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from collapsediag._optional import require
from collapsediag.errors import ReaderError
from collapsediag.readers._rows import BadLines, Row, RowFile, decode_json, kind
from collapsediag.whole_files import ending

# A JSON array or document has to be held whole; a longer one is asked for as JSON lines.
MAX_DOCUMENT_BYTES = 256 * 2**20
MAX_LINE_BYTES = 256 * 2**20
_HEAD_BYTES = 4096
_PARQUET_ROWS = 256
_BATCH_BYTES = 64 * 2**20
# A parquet file of a few hundred bytes can stand for any number of equal values. Dumps are compressed ten- to
# hundredfold; one of equal texts may be more, so small ones are read whatever they expand to.
_MAX_EXPANSION = 1000
_EXPANDED_FREELY = 2**30
_VALUES_FREELY = 50_000_000

_MAGIC = (
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first (zstd -d)"),
    (b"BZh", "bzip2-compressed; unpack it first (bunzip2)"),
    (b"\xfd7zXZ", "xz-compressed; unpack it first (unxz)"),
    (b"\x80\x02", "a Python pickle, which is never loaded (it can run code); save JSON lines instead"),
    (b"\x80\x03", "a Python pickle, which is never loaded (it can run code); save JSON lines instead"),
    (b"\x80\x04", "a Python pickle, which is never loaded (it can run code); save JSON lines instead"),
    (b"\x80\x05", "a Python pickle, which is never loaded (it can run code); save JSON lines instead"),
    (b"ARROW1", "an Arrow file; save it as parquet or JSON lines"),
)
_WIDE = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


def open_rows(path: str | Path) -> RowFile:
    """The file's rows, by what its first bytes say it is. Raises ReaderError naming the file and what to do."""
    path = Path(path)
    with open_bytes(path) as stream:
        head = stream.read(_HEAD_BYTES)
    if not head.strip():
        raise ReaderError(f"{path} is empty. Nothing was written to it; look whether the run got that far.")
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        return ParquetRows(path)
    _refuse_other_kinds(path, head)
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first not in (b"{", b"["):
        raise ReaderError(
            f"{path} begins with {head[:20]!r}, which is not JSON. Readers take JSON lines (one object a line), a JSON "
            "array of objects, or parquet."
        )
    if first == b"[" or _is_one_document(path):
        return JsonDocument(path)
    return JsonLines(path)


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    for magic, what in _MAGIC:
        if head.startswith(magic):
            raise ReaderError(f"{path} is {what}.")
    wide = next((name for mark, name in _WIDE if head.startswith(mark)), None)
    if wide is None and (head[1:64:2].count(0) > 16 or head[0:64:2].count(0) > 16):
        wide = "UTF-16 without a byte-order mark"
    if wide is not None:
        raise ReaderError(
            f"{path} is encoded as {wide} (byte 0 is 0x{head[0]:02x}); readers take UTF-8. Convert it, for example: "
            f"iconv -f utf-16 -t utf-8 FILE > FILE.utf8"
        )
    if b"\x00" in head:
        raise ReaderError(f"{path} is a binary file (a NUL byte at byte {head.index(0)}), not JSON lines or parquet.")


def _is_one_document(path: Path) -> bool:
    """Whether the first line is not a whole JSON value, so that the object must go on over several lines."""
    with open_bytes(path) as stream:
        first = _read_line(stream, path, 1).removeprefix(b"\xef\xbb\xbf")
        while not first.strip():
            first = _read_line(stream, path, 1)
        if not stream.read(1):
            return False
    if first.strip() == b"{":
        return True
    try:
        json.loads(first)
    except json.JSONDecodeError:
        return path.suffixes[-1:] == [".json"] or path.suffixes[-2:] == [".json", ".gz"]
    except (ValueError, RecursionError):
        return False
    return False


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked where they are gzip; every way that can fail is a ReaderError naming the file."""
    try:
        with open(ending(path), "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.open(raw) as unpacked:
                    yield cast("IO[bytes]", unpacked)
            else:
                yield raw
    except FileNotFoundError as error:
        raise ReaderError(f"{path} does not exist.") from error
    except IsADirectoryError as error:
        raise ReaderError(f"{path} is a folder; its files were expected.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReaderError(
            f"{path}: the gzip data is damaged or cut off ({error}). What comes before can be saved with "
            "gzip -dc FILE > FILE.jsonl"
        ) from error
    except OSError as error:
        raise ReaderError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read_line(stream: IO[bytes], path: Path, number: int) -> bytes:
    raw = stream.readline(MAX_LINE_BYTES + 1)
    if len(raw) > MAX_LINE_BYTES:
        raise ReaderError(
            f"{path}, line {number} is longer than {MAX_LINE_BYTES >> 20} MB. One row a line was expected; a file "
            "without newlines is not JSON lines."
        )
    return raw


class JsonLines:
    """One JSON object a line; blank lines are passed over."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def scan(self, bad: BadLines, *, start: int = 0, number: int = 1, stop: int | None = None) -> Iterator[Row]:
        """See RowFile.scan; offsets are bytes of the unpacked text."""
        path = Path(self.path)
        with open_bytes(path) as stream:
            stream.seek(start)
            offset = start
            while stop is None or offset < stop:
                raw = _read_line(stream, path, number)
                if not raw:
                    return
                row = self._row(raw, number, offset, bad)
                if row is not None:
                    yield row
                offset += len(raw)
                number += 1

    def _row(self, raw: bytes, number: int, offset: int, bad: BadLines) -> Row | None:
        mark = len(b"\xef\xbb\xbf") if offset == 0 and raw.startswith(b"\xef\xbb\xbf") else 0
        body = raw[mark:].strip()
        if not body:
            return None
        where = f"{self.path}, line {number}"
        try:
            lead = len(raw[mark:]) - len(raw[mark:].lstrip())
            value = decode_json(body, where=where, offset=offset + mark + lead, torn=not raw.endswith(b"\n"))
            if not isinstance(value, dict):
                raise ReaderError(f"{where}: is {kind(value)}; one JSON object a line was expected.")
        except ReaderError as error:
            bad.meet(error)
            return None
        return Row(value, self.path, number, "line", offset, len(raw))


class JsonDocument:
    """A JSON array of objects, or one object over several lines; held whole, so its size is limited."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def scan(self, bad: BadLines, *, start: int = 0, number: int = 1, stop: int | None = None) -> Iterator[Row]:
        """See RowFile.scan; offsets are positions in the array."""
        with open_bytes(Path(self.path)) as stream:
            raw = stream.read(MAX_DOCUMENT_BYTES + 1)
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise ReaderError(
                f"{self.path} is one JSON value of more than {MAX_DOCUMENT_BYTES >> 20} MB, which cannot be read in "
                "pieces. Make JSON lines of it: jq -c '.[]' FILE > FILE.jsonl"
            )
        mark = len(raw) - len(raw.removeprefix(b"\xef\xbb\xbf"))
        value = decode_json(raw[mark:], where=self.path, offset=mark, torn=False)
        elements = value if isinstance(value, list) else [value]
        if not elements:
            raise ReaderError(f"{self.path} is an empty JSON array; nothing was written to it.")
        size = max(1, len(raw) // len(elements))
        for offset, element in enumerate(elements[start:stop], start):
            if isinstance(element, dict):
                yield Row(element, self.path, offset + 1, "element", offset, size)
            else:
                bad.meet(ReaderError(f"{self.path}, element {offset + 1}: is {kind(element)}; objects were expected."))


class ParquetRows:
    """A parquet table, read a few hundred rows at a time."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def scan(self, bad: BadLines, *, start: int = 0, number: int = 1, stop: int | None = None) -> Iterator[Row]:
        """See RowFile.scan; offsets are row numbers from 0."""
        offset = 0
        for batch in self._batches():
            first, offset = offset, offset + batch.num_rows
            if offset <= start:
                continue
            size = max(1, batch.nbytes // max(1, batch.num_rows))
            for position, data in enumerate(batch.to_pylist(), first):
                if position >= start and (stop is None or position < stop):
                    yield Row(data, self.path, position + 1, "row", position, size)
            if stop is not None and offset >= stop:
                return

    def _batches(self) -> Iterator[Any]:
        parquet = require("pyarrow.parquet", extra="parquet", feature="Reading parquet files")
        arrow = require("pyarrow", extra="parquet", feature="Reading parquet files")
        with open_bytes(Path(self.path)) as stream:
            try:
                with parquet.ParquetFile(io.BufferedReader(cast("io.RawIOBase", stream))) as table:
                    yield from self._bounded(table.iter_batches(batch_size=self._batch_rows(table.metadata)))
            except (arrow.ArrowInvalid, arrow.ArrowException) as error:
                raise ReaderError(
                    f"{self.path} is not a readable parquet file ({str(error).splitlines()[0]}). A file whose writer "
                    "was stopped has no footer and is lost; leave it out."
                ) from error

    def _batch_rows(self, metadata: Any) -> int:
        """As many rows as fit into memory even if each held the largest value of its column."""
        groups = (metadata.row_group(g) for g in range(metadata.num_row_groups))
        largest = 1
        for column in (group.column(c) for group in groups for c in range(group.num_columns)):
            n_bytes = column.total_uncompressed_size
            if column.num_values > max(_VALUES_FREELY, 64 * n_bytes):
                raise ReaderError(
                    f"{self.path}: column {column.path_in_schema!r} stands for {column.num_values:,} values in "
                    f"{n_bytes:,} bytes, more than are taken into memory. Write row groups of fewer rows."
                )
            largest = max(largest, n_bytes)
        return max(1, min(_PARQUET_ROWS, _BATCH_BYTES // largest))

    def _bounded(self, batches: Iterator[Any]) -> Iterator[Any]:
        limit = max(_EXPANDED_FREELY, _MAX_EXPANSION * Path(self.path).stat().st_size)
        n_bytes = 0
        for packed in batches:
            # A column of indices into few values is as large as what it stands for.
            columns = [c.dictionary_decode() if hasattr(c, "dictionary_decode") else c for c in packed.columns]
            batch = packed.from_arrays(columns, names=packed.schema.names)
            n_bytes += batch.nbytes
            if n_bytes > limit or batch.nbytes > 4 * MAX_LINE_BYTES:
                raise ReaderError(
                    f"{self.path} expands to more than {min(n_bytes, limit) >> 20:,} MB, over {_MAX_EXPANSION} times "
                    "its size or too much for one row. This is no dump of rollouts, or one value fills it."
                )
            yield batch
