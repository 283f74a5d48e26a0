"""Bounds on the pickle of a torch file, from its opcodes, before anything is built from it.

torch's restricted unpickler runs no code, but it builds whatever a file describes: a few bytes can describe a tuple
that takes years to hash, or an array of terabytes. The opcodes are followed with sizes in place of values. A file of
an ordinary state dict has about 32 opcodes per tensor.
"""

from __future__ import annotations

import contextlib
import pickletools
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, cast

MAX_OPCODES = 1_000_000
"""Those of 31,000 tensors in one file; they take a few seconds to follow."""

MAX_MARKS = 1000
MAX_ARGUMENT_BYTES = 1_000_000
MAX_TUPLE_DEPTH = 100
MAX_TUPLE_SIZE = 1_000_000

PUSHED = frozenset(
    {"NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
    | {"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1", "GLOBAL"}
)
"""Opcodes that push a new value."""

POPPED = {"APPEND": 1, "SETITEM": 2, "REDUCE": 1, "BUILD": 1, "NEWOBJ": 1}
"""Opcodes that remove values -> their number. REDUCE and NEWOBJ replace the next one by the result."""

TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Value(NamedTuple):
    """A value on the stack: the number of values in it, written out, and its depth; of tuples, others are one value."""

    size: int = 1
    depth: int = 0


ONE = _Value()


class PickleBoundsError(Exception):
    """The pickle is beyond the bounds; says in which way."""


def check_pickle(file: IO[bytes]) -> None:
    """Read one pickle from the file's position to its end; opcodes that torch refuses end the reading.

    Raises:
        PickleBoundsError: beyond the bounds.
    """
    stack = _Stack()
    for number, (opcode, argument, _) in enumerate(_opcodes(file)):
        if number > MAX_OPCODES:
            raise PickleBoundsError(f"more than {MAX_OPCODES} opcodes; a state dict has about 32 per tensor")
        if opcode.name == "GLOBAL" and argument in ("builtins bytearray", "__builtin__ bytearray"):
            raise PickleBoundsError("an array of bytes of any size, which no state dict has")
        if not stack.apply(opcode.name, argument):
            return


def _opcodes(file: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """Opcodes up to the first damage, at which torch stops as well."""
    with contextlib.suppress(ValueError):
        yield from pickletools.genops(cast(IO[bytes], _Arguments(file)))


class _Arguments:
    """A file whose reader may not ask for an argument of any size: the memory would be taken before it is filled."""

    def __init__(self, file: IO[bytes]) -> None:
        self.tell, self.readline = file.tell, file.readline
        self._file = file

    def read(self, length: int) -> bytes:
        if length > MAX_ARGUMENT_BYTES:
            raise PickleBoundsError(f"a text of {length} bytes; names of a state dict have less than 1000")
        return self._file.read(length)


class _Stack:
    """Stack, marks and memo of an unpickler, of sizes."""

    def __init__(self) -> None:
        self._values: list[_Value] = []
        self._outer: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}

    def apply(self, name: str, argument: int) -> bool:
        """Follow one opcode; False for one that torch refuses, and for one that takes values that are not there."""
        try:
            return self._apply(name, argument)
        except (IndexError, KeyError):
            return False

    def _apply(self, name: str, argument: int) -> bool:
        if name in PUSHED:
            self._values.append(ONE)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._values[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._values.append(self._memo[argument])
        elif name == "MARK":
            self._outer.append(self._values)
            self._values = []
            if len(self._outer) > MAX_MARKS:
                raise PickleBoundsError(f"more than {MAX_MARKS} open marks; a state dict has less than 10")
        elif name in TUPLES:
            self._values[-TUPLES[name] :] = [_tuple_of(self._values[-TUPLES[name] :])]
        elif name in POPPED:
            del self._values[-POPPED[name] :]
            if name not in ("APPEND", "SETITEM", "BUILD"):
                self._values[-1] = ONE
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, self._values = self._values, self._outer.pop()
            if name == "TUPLE":
                self._values.append(_tuple_of(items))
        elif name == "BINPERSID":
            self._values[-1] = ONE
        else:
            return name == "PROTO"
        return True


def _tuple_of(items: list[_Value]) -> _Value:
    found = _Value(1 + sum(v.size for v in items), 1 + max((v.depth for v in items), default=0))
    if found.size > MAX_TUPLE_SIZE or found.depth > MAX_TUPLE_DEPTH:
        raise PickleBoundsError(
            f"a tuple of {found.size} values, nested {found.depth} deep; those of a state dict have 10"
        )
    return found
