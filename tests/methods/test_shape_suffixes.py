"""Names tell shapes: every tensor of a numerical function has the axes that its suffix names."""

import itertools
from typing import Any

import pytest
import torch
from tests.helpers.experts import Experts, usable_experts, variants
from tests.helpers.shapes import checked_suffixes, suffix_problems
from tests.helpers.survey import call

from actmat.linalg.lowrank import LowRank, truncate
from actmat.methods import MergeMethod, all_methods


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
