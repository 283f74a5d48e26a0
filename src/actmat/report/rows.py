"""JSON objects with lists that are too long to be in memory: rows are made, hashed and written one at a time."""

from __future__ import annotations

import json
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


def canonical_json(fields: dict[str, Any]) -> Iterator[str]:
    """JSON of an object with sorted keys and without white space, in pieces.

    >>> "".join(canonical_json({"b": [1, {"d": 2, "c": 3}], "a": None}))
    '{"a":null,"b":[1,{"c":3,"d":2}]}'
    """
    return json.JSONEncoder(sort_keys=True, separators=(",", ":")).iterencode(fields)


def indented_json(fields: dict[str, Any]) -> Iterator[str]:
    r"""JSON of an object as `json.dumps(fields, indent=1, ensure_ascii=False)` writes it, in pieces.

    >>> "".join(indented_json({"a": StreamedRows(lambda: [1, 2])}))
    '{\n "a": [\n  1,\n  2\n ]\n}'
    """
    return json.JSONEncoder(indent=1, ensure_ascii=False).iterencode(fields)
