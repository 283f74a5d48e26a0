"""Operations of a method, by its declared cost, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.merging import EMBEDDING, INNER, NORM, UP0, VOCAB, WIDTH, Family

import actmat
from actmat.methods import METHODS
from actmat.methods.contract import MergeMethod
from actmat.plan.cost import method_flops

ROWS, INPUTS, EXPERTS = 6, 10, 3
"""Of one matrix; number of deltas."""

BY_HAND = {
    "N^2": 60,
    "N^3": 600,
    "T N^2": 180,
    "T N^2 log N": 180 * 4,
    "T^2 N^2": 540,
    "T N^3": 1800,
    "2 T^2 N^3": 10_800,
    "(T + 3) N^3": 3600,
    "(2T + 2) N^3": 4800,
    "(2T + 3) N^3": 5400,
    "(2T + 4) N^3": 6000,
}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_method_is_counted_as_by_hand(method: MergeMethod) -> None:
    expected = BY_HAND[method.flops]
    assert method_flops(method, [(ROWS, INPUTS)], EXPERTS) == expected
    assert method_flops(method, [(ROWS, INPUTS)] * 2, EXPERTS) == 2 * expected, "logical matrices add up"
    assert method_flops(method, [(4, ROWS, INPUTS)], EXPERTS) == 4 * expected, "so do the matrices of a stack"


def test_all_declared_costs_are_in_the_table() -> None:
    assert {m.flops for m in METHODS} == BY_HAND.keys()


def test_the_plan_adds_up_its_items(tmp_path: Path) -> None:
    """Layers by ACTMat, `(2T + 3) N^3`; norms and embeddings as means, `T N^2`."""
    family = Family.make(tmp_path, layers=1, experts=3)
    plan = actmat.plan(family.base, family.experts)
    by_name = {item.name: item.cost.flops for item in plan.items}
    assert by_name[UP0] == 9 * INNER * WIDTH * WIDTH
    assert by_name[NORM] == 3 * WIDTH
    assert by_name[EMBEDDING] == 3 * VOCAB * WIDTH
    assert by_name["lm_head.weight"] == 9 * VOCAB * WIDTH * WIDTH
    down, query, norm = 9 * WIDTH * INNER * INNER, 9 * WIDTH**3, 3 * WIDTH
    head = by_name["lm_head.weight"]
    assert plan.flops == by_name[UP0] + down + query + head + 2 * norm + by_name[EMBEDDING]
    kept = actmat.plan(family.base, family.experts, keep=["*"])
    assert kept.flops == 0
