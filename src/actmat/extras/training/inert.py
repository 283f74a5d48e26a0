"""Pickles as inert data: their opcodes are followed by a parser of our own, and nothing that they name is run.

A pickle is a program for a stack machine. Here it may build numbers, texts, tuples, lists and mappings; a class or a
function that it names must be in a given list, and a call of it becomes an `Inert`: the name with its arguments and
state. Python's unpickler is not involved, so that a hostile file has nothing to call.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Collection
from typing import Any

MAX_OPCODES = 20_000_000
"""About 50 per shard of a tensor: 400,000 shards; they take some 30 s."""

ATOMS = frozenset(
    {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "BINUNICODE8"}
    | {"SHORT_BINUNICODE", "SHORT_BINBYTES", "BINBYTES"}
)
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list}
SIZED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = frozenset({"PROTO", "FRAME"})


class InertError(Exception):
    """The pickle is damaged, or holds something that is not on the list; says what."""


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


def parse_pickle(content: bytes, allowed: Collection[str]) -> Any:
    """The value of a pickle.

    >>> import pickle
    >>> parse_pickle(pickle.dumps({"a": (1, [2.5])}, protocol=4), ())
    {'a': (1, [2.5])}

    Args:
        content: the pickle, of any protocol from 2 on.
        allowed: names of classes and functions, `module name`.

    Raises:
        InertError: damaged, too long, or with a name that is not allowed.
    """
    machine = _Machine(allowed)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(content))):
            if count > MAX_OPCODES:
                raise InertError(f"more than {MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                return machine.pop()
            machine.apply(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise InertError(f"damaged: {str(error)[:120] or type(error).__name__}") from None
    raise InertError("damaged: it has no end")


class _Machine:
    """Stack, marks and memo."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def apply(self, name: str, argument: Any) -> None:
        """Follow one opcode."""
        stack = self._stack
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
            self._stack = []
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in SIZED_TUPLES:
            stack[-SIZED_TUPLES[name] :] = [tuple(stack[-SIZED_TUPLES[name] :])]
        elif name not in IGNORED:
            self._apply_rare(name, argument)

    def _apply_rare(self, name: str, argument: Any) -> None:
        if name in ("TUPLE", "APPENDS", "SETITEMS", "ADDITEMS"):
            items, self._stack = self._stack, self._marks.pop()
            self._fill(name, items)
            return
        stack = self._stack
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
                raise InertError("a call of something that is no class or function")
            stack.append(Inert(function.name, args, called=True))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Inert):
                raise InertError("a state of something that is no object")
            stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Inert("persistent", (stack.pop(),), called=True))
        else:
            raise InertError(f"the opcode {name}")

    def _fill(self, name: str, items: list[Any]) -> None:
        if name == "TUPLE":
            self._stack.append(tuple(items))
            return
        target = self._stack[-1]
        if isinstance(target, Inert):  # items of an OrderedDict or of another container that was called
            if target.state is None:
                target.state = {} if name == "SETITEMS" else []
            target = target.state
        if name != "SETITEMS":
            target.extend(items)
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | Inert):  # a tuple of tuples could take years to hash
                raise InertError(f"a key that is a {type(key).__name__}")
            target[key] = value

    def _named(self, name: str) -> Inert:
        if name not in self._allowed:
            raise InertError(f"the name '{name[:200]}', which is none of those that such a file has")
        return Inert(name)
