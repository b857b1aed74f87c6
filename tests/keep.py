"""A sink that keeps what it is given."""

from __future__ import annotations

from collapsediag.record import Record


class Keep:
    """Records as they come."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]
