import math

import pytest
import torch

from actmat.linalg.interference.rule import FLOAT32_EPS, Filter, gain

VALUES = torch.tensor([-1e-18, 0.0, 1e-6, 1e-3, 0.5, 2.0], dtype=torch.float64)


def test_hard_cutoff_is_strict_and_relative_to_the_largest():
    gain_K, stats = gain(torch.tensor([0.5, 1.0, 2.0]), Filter(), rtol=0.5, mean=1.0)
    assert gain_K.tolist() == [0.5]  # 1.0 = 0.5 * 2.0 is at the cut-off: dropped
    assert stats == {"rank": 1, "cutoff": 1.0, "rtol": 0.5}


@pytest.mark.parametrize(("size", "width"), [(12, 4096), (4096, 4096), (9000, 4096)])
def test_default_cutoff_is_that_of_the_layer_in_every_form(size, width):
    assert Filter().resolved_rtol(size, width, torch.float32) == width * FLOAT32_EPS


def test_cutoff_never_goes_below_rounding():
    assert Filter(rtol=0.0).resolved_rtol(100, 100, torch.float64) == 100 * torch.finfo(torch.float64).eps
    assert Filter(rtol=0.0).resolved_rtol(100, 100, torch.float32) == 100 * FLOAT32_EPS
    assert Filter(rtol=0.3).resolved_rtol(100, 100, torch.float32) == 0.3


def test_tikhonov_is_finite_at_zero_and_below():
    gain_K, stats = gain(VALUES, Filter("tikhonov", ridge=0.2), rtol=0.0, mean=0.5)
    assert stats == {"ridge": pytest.approx(0.1)}
    assert gain_K.tolist() == pytest.approx([1 / (max(v, 0) + 0.1) for v in VALUES.tolist()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponential_tends_to_the_time_at_zero(dtype):
    gain_K, stats = gain(VALUES.to(dtype), Filter("exponential", time=3.0), rtol=0.0, mean=0.5)
    assert stats == {"time": 6.0}
    expected = [6.0, 6.0] + [(1 - math.exp(-6 * v)) / v for v in VALUES[3:].tolist()]
    assert gain_K[[0, 1, 3, 4, 5]].tolist() == pytest.approx(expected, rel=1e-6)
    assert float(gain_K[2]) == pytest.approx(6.0, rel=1e-5)  # not lost to 1 - exp(-6e-6)


def test_exponential_time_can_be_absolute():
    gain_K, _ = gain(VALUES, Filter("exponential", time=3.0, time_is_absolute=True), rtol=0.0, mean=123.0)
    assert float(gain_K[-1]) == pytest.approx((1 - math.exp(-6.0)) / 2.0)


@pytest.mark.parametrize(
    ("values", "kept"),
    [([1.0, 1.0, 1.0, 1.0], 4), ([1e-30, 1e-30, 1e-30, 1.0], 1), ([1.0, 4.0, 9.0], 3), ([0.01, 0.01, 1.0], 2)],
)
def test_adaptive_keeps_the_participation_number(values, kept):
    spectrum = torch.tensor(values, dtype=torch.float64)
    participation = float(spectrum.sqrt().sum() ** 2 / spectrum.sum())
    assert kept == math.ceil(participation - 1e-6)
    gain_K, stats = gain(spectrum, Filter("adaptive"), rtol=0.0, mean=1.0)
    assert stats["rank"] == kept
    assert gain_K.tolist() == pytest.approx([1 / v for v in values[-kept:]])


def test_adaptive_respects_the_cutoff():
    assert gain(torch.ones(3), Filter("adaptive"), rtol=1.0, mean=1.0)[1]["rank"] == 0
