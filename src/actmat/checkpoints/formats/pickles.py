"""The project's one interpreter of pickles: opcodes are followed within bounds, and no name in them is run.

A pickle is a program for a stack machine. Here it builds numbers, texts, tuples, lists and mappings; a class or
function becomes an `Inert`, and a call of it the same name with arguments and state. Metadata of distributed
checkpoints is read from the result. Torch files are checked by it before torch's restricted unpickler opens them: that
runs no code, but builds whatever a file describes, and a few bytes can describe a tuple that takes years to hash.
"""

from __future__ import annotations

import contextlib
import io
import pickletools
import struct
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import IO, Any, cast

MAX_OPCODES = 20_000_000
"""About 50 per shard of a tensor: 400,000 shards; they take some 30 s."""

MAX_TORCH_OPCODES = 1_000_000
"""A state dict has about 32 per tensor: those of 31,000 tensors in one file; they take a few seconds to follow."""

MAX_MARKS = 1000
MAX_ARGUMENT_BYTES = 1_000_000
MAX_TUPLE_DEPTH = 100
MAX_TUPLE_SIZE = 1_000_000

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
ATOMS = frozenset(
    {*CONSTANTS, "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "BINUNICODE8"}
    | {"SHORT_BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "SHORT_BINSTRING"}
)
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list}
SIZED_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = frozenset({"PROTO", "FRAME"})
DAMAGED = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error)


class PickleError(Exception):
    """The pickle is damaged, exceeds a bound or has a forbidden name; the message says which."""


class Inert:
    """A class or function by name, with the arguments of its call and the state that was set; never called.

    Compared and hashed by identity, so that hostile nesting costs nothing.
    """

    __slots__ = ("args", "called", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = (), *, called: bool = False) -> None:
        self.name = name
        self.args = args
        self.called = called
        self.state: Any = None

    def __repr__(self) -> str:
        return f"<{self.name[:200]}>"


class _Tuple(tuple[Any, ...]):
    """A tuple with its depth and its number of values when expanded; other containers count as one value."""

    size: int
    depth: int


def parse_pickle(content: bytes, allowed: Collection[str]) -> Any:
    """The value of a pickle.

    >>> import pickle
    >>> parse_pickle(pickle.dumps({"a": (1, [2.5])}, protocol=4), ())
    {'a': (1, [2.5])}

    Args:
        content: the pickle, of any protocol from 2 on.
        allowed: names of classes and functions, `module name`.

    Raises:
        PickleError: damaged, beyond the bounds, or with a name that is not allowed.
    """
    try:
        return _follow(io.BytesIO(content), allowed, MAX_OPCODES)
    except DAMAGED as error:
        raise PickleError(f"damaged: {str(error)[:120] or type(error).__name__}") from None


def check_pickle(file: IO[bytes]) -> None:
    """Follow one pickle from the file's position to its end, or to the first damage, which torch refuses as well.

    Raises:
        PickleError: beyond the bounds.
    """
    with contextlib.suppress(*DAMAGED):
        _follow(file, None, MAX_TORCH_OPCODES)


def _follow(file: IO[bytes], allowed: Collection[str] | None, most: int) -> Any:
    """The value of a pickle; one of the errors `DAMAGED` if it is cut off or has an opcode that no state dict has."""
    machine = _Machine(allowed)
    for count, (opcode, argument, _) in enumerate(pickletools.genops(_bounded(file))):
        if count > most:
            raise PickleError(f"more than {most} opcodes; a state dict has about 32 per tensor")
        if opcode.name == "STOP":
            return machine.stack.pop()
        machine.apply(opcode.name, argument)
    raise ValueError("it has no end")


def _bounded(file: IO[bytes]) -> IO[bytes]:
    """The file with a bound on the size of an argument, whose memory is allocated before it is read."""

    def read(length: int) -> bytes:
        if length > MAX_ARGUMENT_BYTES:
            raise PickleError(f"a text of {length} bytes; names of a state dict have less than 1000")
        return file.read(length)

    return cast(IO[bytes], SimpleNamespace(read=read, readline=file.readline, tell=file.tell))


class _Machine:
    """Stack, marks and memo; `allowed`: names that a pickle may have, None for all but those that take memory."""

    def __init__(self, allowed: Collection[str] | None) -> None:
        self._allowed = allowed
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def apply(self, name: str, argument: Any) -> None:
        """Follow one opcode."""
        stack = self.stack
        if name in ATOMS:
            stack.append(CONSTANTS.get(name, argument))
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MARK":
            self._marks.append(stack)
            self.stack = []
            if len(self._marks) > MAX_MARKS:
                raise PickleError(f"more than {MAX_MARKS} open marks; a state dict has less than 10")
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in SIZED_TUPLES:
            count = len(stack) - SIZED_TUPLES[name]
            if count < 0:
                raise IndexError("values that are not there")
            stack[count:] = [_tuple_of(stack[count:])]
        elif name not in IGNORED:
            self._apply_rare(name, argument)

    def _apply_rare(self, name: str, argument: Any) -> None:
        if name in ("TUPLE", "APPENDS", "SETITEMS", "ADDITEMS"):
            items, self.stack = self.stack, self._marks.pop()
            self._fill(name, items)
            return
        stack = self.stack
        if name == "APPEND":
            item = stack.pop()
            self._fill("APPENDS", [item])
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._fill("SETITEMS", [key, value])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(self._named(argument if name == "GLOBAL" else f"{stack.pop(-2)} {stack.pop()}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, function = stack.pop(), stack.pop()
            if not isinstance(function, Inert) or function.called or not isinstance(args, tuple):
                raise ValueError("a call of something that is not a class or function")
            stack.append(Inert(function.name, args, called=True))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Inert):
                raise ValueError("a state of something that is not an object")
            stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Inert("persistent", (stack.pop(),), called=True))
        else:
            raise ValueError(f"the opcode {name}")

    def _fill(self, name: str, items: list[Any]) -> None:
        if name == "TUPLE":
            self.stack.append(_tuple_of(items))
            return
        target = self.stack[-1]
        if isinstance(target, Inert):  # items of an OrderedDict or of another container that was called
            if target.state is None:
                target.state = {} if name == "SETITEMS" else []
            target = target.state
        if name != "SETITEMS":
            target.extend(items)
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            # only what is hashed at once is a key here: a tuple of tuples could take years
            target[key if isinstance(key, str | int | float | Inert) else Inert("key")] = value

    def _named(self, name: str) -> Inert:
        if self._allowed is None:
            if name in ("builtins bytearray", "__builtin__ bytearray"):
                raise PickleError("an array of bytes of any size, which no state dict has")
        elif name not in self._allowed:
            raise PickleError(f"the name '{name[:200]}', which such a file does not have")
        return Inert(name)


def _tuple_of(items: list[Any]) -> _Tuple:
    value = _Tuple(items)
    inner = [v for v in items if isinstance(v, _Tuple)]
    value.size = 1 + len(items) - len(inner) + sum(v.size for v in inner)
    value.depth = 1 + max((v.depth for v in inner), default=0)
    if value.size > MAX_TUPLE_SIZE or value.depth > MAX_TUPLE_DEPTH:
        raise PickleError(f"a tuple of {value.size} values, nested {value.depth} deep; those of a state dict have 10")
    return value
