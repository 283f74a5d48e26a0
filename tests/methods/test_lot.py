from __future__ import annotations

import pytest
import torch
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.errors import StatisticsError
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method

LOT = get_method("lot")

merge = LOT.merge
merge_lowrank = LOT.lowrank.merge


def test_it_minimizes_the_drift_of_the_features():
    """`sum_t ||X_t (D - D_t)^T||^2` by a least-squares routine on the stacked inputs."""
    samples, deltas = random_deltas(3, 20, 6, seed=31), random_deltas(3, 9, 6)
    targets = torch.cat([x @ d.T for x, d in zip(samples, deltas, strict=True)])
    expected = torch.linalg.lstsq(torch.cat(samples), targets).solution.T
    found = merge(deltas, statistics={"gram": [x.T @ x for x in samples]}).value
    assert relative_error(found, expected) < 1e-12


def test_weights_multiply_the_drift():
    samples, deltas = random_deltas(2, 20, 6, seed=31), random_deltas(2, 9, 6)
    targets = torch.cat([samples[0] @ deltas[0].T, 3 * samples[1] @ deltas[1].T])
    expected = torch.linalg.lstsq(torch.cat([samples[0], 3 * samples[1]]), targets).solution.T
    found = merge(deltas, statistics={"gram": [x.T @ x for x in samples]}, weights=[1.0, 9.0]).value
    assert relative_error(found, expected) < 1e-12


def test_low_rank():
    pairs = [LowRank(b, a) for b, a in zip(random_deltas(2, 9, 2), random_deltas(2, 2, 6, seed=1), strict=True)]
    statistics = {"gram": [x.T @ x for x in random_deltas(2, 20, 6, seed=31)]}
    dense = merge([p.dense() for p in pairs], statistics=statistics).value
    assert relative_error(merge_lowrank(pairs, statistics=statistics).value.dense(), dense) < 1e-12


def test_it_needs_grams_and_no_base():
    assert LOT.needs_statistics == ("gram",)
    assert not LOT.needs_base
    with pytest.raises(StatisticsError, match="'gram'"):
        merge(random_deltas(2, 3, 4))
