"""Names tell shapes: every tensor of a numerical function has the axes that its suffix names.

`delta_OI` has axes `O` and `I`, of one size each in every call. Leading batch axes are allowed. The first letter of a
sequence of tensors is its length (`chunks_TP`); a digit is a size.
"""

import itertools
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from tests.helpers.experts import Experts, usable_experts, variants
from tests.helpers.survey import call
from torch import Tensor

from actmat.linalg.lowrank import LowRank, truncate
from actmat.methods import MergeMethod, all_methods

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


@pytest.mark.parametrize("method", all_methods(), ids=lambda m: m.name)
def test_suffixes_of_every_method(method: MergeMethod) -> None:
    with checked_suffixes() as problems:
        for shape, dtype in itertools.product([(7, 11), (24, 5), (2, 6, 9)], (torch.float32, torch.float64)):
            experts = Experts.random(usable_experts(method, 3), shape, dtype=dtype)
            for variant in variants(method):
                options = method.resolve_options(variant)
                given = experts.given(method, options)
                call(method, experts.deltas, options, **given)
    assert not problems


@pytest.mark.parametrize("method", [m for m in all_methods() if m.lowrank], ids=lambda m: m.name)
def test_suffixes_of_every_low_rank_form(method: MergeMethod) -> None:
    experts = Experts.random(3, (7, 11))
    deltas = [LowRank(d[:, : t + 1], d[: t + 1]) for t, d in enumerate(experts.deltas)]
    given: dict[str, Any] = {"statistics": experts.statistics, "generator": torch.Generator().manual_seed(0)}
    with checked_suffixes() as problems:
        for variant in variants(method):
            options = method.resolve_options(variant)
            if method.why_dense(options, 3) is None:
                method.lowrank.merge(deltas, **{n: v for n, v in given.items() if n in method.needs}, **options)
    assert not problems


def test_suffixes_of_truncation() -> None:
    [delta] = Experts.random(1, (7, 11)).deltas
    factors = LowRank(delta[:, :2], delta[:2])
    with checked_suffixes() as problems:
        truncate(factors, 1)
        truncate(factors, 4)
    assert not problems


def test_a_wrong_suffix_is_found() -> None:
    matrix, vector = torch.zeros(3, 4), torch.zeros(3)
    assert suffix_problems({"x_OI": matrix, "s_O": vector, "n_experts": 2, "batch_OI": torch.zeros(2, 3, 4)}) == []
    assert suffix_problems({"x_OI": matrix, "s_I": vector}) == ["s_I has I = 3, and x_OI has 4"]
    assert suffix_problems({"x_OI": vector}) == ["x_OI has 1 axes"]
    assert suffix_problems({"rows_TS": [vector, vector], "signs_T": vector}) == ["signs_T has T = 3, and rows_TS has 2"]
    assert suffix_problems({"work_2S": [vector, vector, vector]}) == ["work_2S has 2 = 3, and work_2S has 2"]
