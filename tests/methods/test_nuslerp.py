"""NuSLERP vector by vector, its ends, and slerp as its special case."""

import math
from typing import Any

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.nuslerp import merge
from actmat.methods import get_method


def on_the_arc(first: Tensor, second: Tensor, t: float) -> Tensor:
    """The textbook's formula for one pair of vectors."""
    angle = math.acos(float(first @ second / first.norm() / second.norm()))
    return (math.sin((1 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)


@pytest.fixture
def experts() -> Experts:
    return Experts.random(2, (7, 5))


@pytest.mark.parametrize("along", ["tensor", "rows", "columns"])
@pytest.mark.parametrize("of", ["deltas", "weights"])
def test_every_vector_goes_along_its_arc(along: Any, of: Any, experts: Experts) -> None:
    ends = [d if of == "deltas" else experts.base + d for d in experts.deltas]
    expected = torch.empty_like(ends[0])
    if along == "tensor":
        expected = on_the_arc(ends[0].flatten(), ends[1].flatten(), 0.25).view_as(expected)
    for k in range(7 if along == "rows" else 5 if along == "columns" else 0):
        place = (k, slice(None)) if along == "rows" else (slice(None), k)
        expected[place] = on_the_arc(ends[0][place], ends[1][place], 0.25)
    found = merge(experts.deltas, weights=[3.0, 1.0], base=experts.base, of=of, along=along).value
    assert relative_error(found if of == "deltas" else experts.base + found, expected) <= F64_ORACLE


def test_of_whole_weights_it_is_slerp(experts: Experts) -> None:
    expected = get_method("slerp").merge(experts.deltas, base=experts.base, t=0.3, linear_above=1.0).value
    found = merge(experts.deltas, weights=[0.7, 0.3], base=experts.base, of="weights").value
    assert relative_error(found, expected) <= F64_ORACLE


def test_parallel_and_zero_vectors_and_weights_that_cancel(experts: Experts) -> None:
    first = experts.deltas[0]
    assert relative_error(merge([first, 3 * first], weights=[1, 1]).value, 2 * first) <= F64_ORACLE
    zero = torch.zeros_like(first)
    assert relative_error(merge([first, zero]).value, math.sin(math.pi / 4) * first) <= F64_ORACLE
    assert merge(experts.deltas, weights=[1.0, -1.0]).stats["t"] == 0.5
    vector = torch.arange(1.0, 5.0)
    for along in ("tensor", "rows", "columns"):
        assert torch.equal(merge([vector, vector], along=along).value, vector)
    assert torch.equal(merge([first]).value, first)
