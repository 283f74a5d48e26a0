"""Lists of a JSON object that are too long to be in memory: rows are made, hashed and written one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class StreamedRows(list[Any]):
    """A list that is made again for each iteration, and holds nothing; `json` writes it row by row.

    >>> rows = StreamedRows(lambda: iter([1, 2]))
    >>> list(iter(rows)), list(iter(rows))
    ([1, 2], [1, 2])
    """

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())

    def __bool__(self) -> bool:
        return any(True for _ in self)
