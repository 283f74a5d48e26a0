"""JSON objects with lists that are too long to be in memory: rows are made, hashed and written one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class StreamedRows:
    """A list that is made again for each iteration.

    >>> rows = StreamedRows(lambda: iter([1, 2]))
    >>> list(rows), list(rows)
    ([1, 2], [1, 2])
    """

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def canonical_json(fields: Mapping[str, Any]) -> Iterator[str]:
    """JSON of an object with sorted keys and without white space, in pieces.

    >>> "".join(canonical_json({"b": [1, {"d": 2, "c": 3}], "a": None}))
    '{"a":null,"b":[1,{"c":3,"d":2}]}'
    """

    def dump(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    for number, (name, value) in enumerate(sorted(fields.items())):
        yield f"{',' if number else '{'}{dump(name)}:"
        yield from (_list(value, dump, "[", ",", "]") if isinstance(value, list | StreamedRows) else [dump(value)])
    yield "}" if fields else "{}"


def indented_json(fields: Mapping[str, Any]) -> Iterator[str]:
    r"""JSON of an object as `json.dumps(fields, indent=1, ensure_ascii=False)` writes it, in pieces.

    >>> "".join(indented_json({"a": StreamedRows(lambda: [1, 2])}))
    '{\n "a": [\n  1,\n  2\n ]\n}'
    """

    def dump(value: Any, depth: int) -> str:
        return json.dumps(value, indent=1, ensure_ascii=False).replace("\n", "\n" + " " * depth)

    for number, (name, value) in enumerate(fields.items()):
        yield f"{',' if number else '{'}\n {dump(name, 1)}: "
        yield from (_list(value, lambda v: dump(v, 2), "[\n  ", ",\n  ", "\n ]") if isinstance(value, StreamedRows)
                    else [dump(value, 1)])  # fmt: skip
    yield "\n}" if fields else "{}"


def _list(values: Iterable[Any], dump: Callable[[Any], str], before: str, between: str, after: str) -> Iterator[str]:
    empty = True
    for value in values:
        yield (before if empty else between) + dump(value)
        empty = False
    yield "[]" if empty else after
