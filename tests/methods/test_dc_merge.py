"""DC-Merge against a transcription of its two published programs."""

import pytest
import torch
from tests.helpers.spectra import orthonormal, random_deltas, with_spectrum
from tests.tolerances import relative_error

from actmat.methods.dc_merge import merge, smooth


def test_smoothing_keeps_the_sum_and_the_rank():
    s = torch.tensor([12.0, 3.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.equal(smooth(s, "none", 5.0), s)
    for smoothing, rho, top in (("mean", 5.0, 1.0), ("linear", 5.0, 5.0), ("linear", 99.0, 12.0)):
        out = smooth(s, smoothing, rho)
        assert float(out.sum()) == pytest.approx(16.0)
        assert float(out[0] / out[2]) == pytest.approx(top)
        assert float(out[3]) == 0
    assert not smooth(torch.zeros(3), "linear", 5.0).any()


def test_experts_apart_are_summed_where_all_entries_are_kept():
    left, right = orthonormal(14, 6, 1), orthonormal(12, 6, 2)
    deltas = [
        left[:, own] @ torch.diag(torch.tensor([3.0, 2.0, 1.0]).double()) @ right[:, own].T
        for own in (slice(0, 3), slice(3, 6))
    ]
    assert relative_error(merge(deltas, k=3, density=1.0).value, sum(deltas)) < 1e-12
    one = merge(deltas, k=3, density=1 / 36).value  # one entry each: the leading directions
    assert sorted(torch.linalg.svdvals(one)[:3].tolist(), reverse=True) == pytest.approx([3.0, 3.0, 0.0], abs=1e-12)


def test_one_expert_is_not_returned():
    delta = random_deltas(1, 20, 20)[0]
    found = merge([delta])
    assert found.stats["entries_kept"] == 1
    assert float(torch.linalg.svdvals(found.value)[0]) == pytest.approx(float(torch.linalg.svdvals(delta)[0]))
    assert relative_error(merge([delta], density=1.0).value, delta) < 1e-11


def test_equal_experts_share_their_blocks():
    """Their directions are the same, so that half of every vector belongs to each block."""
    delta = with_spectrum(10, 8, [4.0, 2.0], seed=3)
    found = merge([delta, delta], k=2, density=1.0)
    assert bool(found.value.isfinite().all())
    assert relative_error(found.value, delta / 2) < 1e-11


def test_directions_beyond_the_rank_are_left_out():
    deltas = [with_spectrum(12, 15, [3.0, 2.0], seed=1), with_spectrum(12, 15, [5.0, 4.0, 3.0, 2.0, 1.0], seed=2)]
    full, capped = merge(deltas, density=1.0), merge(deltas, density=1.0, k=5)
    assert full.stats["k"] == 6
    assert relative_error(full.value, capped.value) < 1e-11
    zero = merge([deltas[0], torch.zeros(12, 15).double()], density=1.0)
    assert relative_error(zero.value, deltas[0]) < 1e-11


def test_more_experts_than_directions_and_no_directions():
    deltas = random_deltas(4, 3, 10)
    assert not merge(deltas).value.any()
    assert merge(deltas).stats["k"] == 0
    assert merge(deltas, k=1, density=1.0).value.any()
    assert not merge(deltas, k=0).value.any()
