import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.linalg.interference.rule import Estimator
from actmat.linalg.masks.mask import trim_to_top


@settings(max_examples=50)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), fraction=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_trim_keeps_the_largest_entries_and_no_others(rows, columns, fraction, seed):
    delta = random_deltas(1, rows, columns, seed=seed)[0]
    trimmed = trim_to_top(delta, fraction)
    kept = trimmed != 0
    assert int(kept.sum()) == max(1, round(fraction * (rows * columns)))
    assert torch.equal(trimmed[kept], delta[kept])
    if not kept.all():
        assert delta[kept].abs().min() >= delta[~kept].abs().max()


def test_trim_keeps_all_entries_equal_to_the_smallest_kept():
    delta = torch.tensor([[3.0, -2.0], [2.0, 1.0]])
    assert torch.equal(trim_to_top(delta, 0.5), torch.tensor([[3.0, -2.0], [2.0, 0.0]]))


def test_root_in_float32_does_not_go_through_the_square():
    """s = 1e-4: its square 1e-8 drowns in float32 rounding of the Gram, the SVD still resolves it."""
    delta = torch.diag(torch.tensor([1.0, 1e-4])) @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    factor, _ = Estimator(power=0.5).factor(delta)
    smallest = torch.linalg.eigvalsh((factor.T @ factor).double())[0]
    assert float(smallest) == pytest.approx(1e-4, rel=1e-2)


def test_steps_apply_in_order_trim_center_power():
    delta = random_deltas(1, 6, 5)[0]
    factor, _ = Estimator(trim=0.5, center=True, power=0.5).factor(delta)
    trimmed = trim_to_top(delta, 0.5)
    centered = trimmed - trimmed.mean(0)
    assert relative_error((factor.T @ factor) @ (factor.T @ factor), centered.T @ centered) < 1e-12


def test_normalizer_guards_a_zero_delta():
    estimator = Estimator(normalize="norm")
    assert estimator.weight(4.0) == 0.25
    assert estimator.weight(0.0) == 0.0
    assert Estimator().weight(4.0) == 1.0
