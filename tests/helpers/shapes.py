"""Checks shape suffixes while functions run: `delta_OI` has axes `O` and `I`, of one size each in every call.

Leading batch axes are allowed. The first letter of a sequence of tensors is its length (`chunks_TP`); a digit is a
size.
"""

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

SUFFIX = re.compile(r"[a-z0-9]_([A-Z0-9]+)$")
PACKAGES = ("actmat.linalg.", "actmat.methods.", "actmat.extras.research.")


def suffix_problems(variables: Mapping[str, Any]) -> list[str]:
    """Tensors whose shape does not fit their name, or does not fit another one's."""
    sizes: dict[str, tuple[int, str]] = {}
    problems = []
    for name, value in variables.items():
        found = SUFFIX.search(name)
        shape = None if found is None else _shape(value, len(found[1]))
        if found is None or shape is None:
            continue
        if len(shape) < len(found[1]):
            problems.append(f"{name} has {len(shape)} axes")
            continue
        for letter, size in zip(found[1], shape[len(shape) - len(found[1]) :], strict=True):
            known, first = sizes.setdefault(letter, (int(letter) if letter.isdigit() else size, name))
            if known != size:
                problems.append(f"{name} has {letter} = {size}, and {first} has {known}")
    return problems


def _shape(value: Any, letters: int) -> tuple[int, ...] | None:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple) and value and all(isinstance(x, Tensor) for x in value):
        shapes = {tuple(x.shape) for x in value}
        return (len(value), *shapes.pop()) if len(shapes) == 1 and letters > 1 else None
    return None


@contextmanager
def checked_suffixes() -> Iterator[set[str]]:
    """Collect the problems of all calls of numerical functions on this thread, as `module.function: problem`."""
    problems: set[str] = set()

    def profile(frame: FrameType, event: str, value: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "return" and module.startswith(PACKAGES):
            where = f"{module}.{frame.f_code.co_qualname}"
            problems.update(f"{where}: {p}" for p in suffix_problems(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield problems
    finally:
        sys.setprofile(before)
    assert threading.current_thread() is threading.main_thread(), "profiles belong to one thread"
