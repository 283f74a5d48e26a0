import pytest
import torch
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.extras.research.sce import SCE


def test_exact_cancellation_elects_plus() -> None:
    out = call(SCE, [torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 1.0])])
    assert float(out[0]) == 1.0


def test_only_entries_on_which_experts_differ_count_for_the_fraction() -> None:
    first = torch.tensor([1.0, 5.0, 2.0, 3.0], dtype=torch.float64)
    second = torch.tensor([1.0, 5.0, 4.0, 9.0], dtype=torch.float64)
    out = call(SCE, [first, second], select_topk=0.5)
    assert (out != 0).tolist() == [False, False, False, True], "half of the two entries that differ"


def test_units_do_not_matter() -> None:
    """Deltas of a real fine-tuning have mean squares far below 1e-6; energies must still weigh the experts."""
    deltas = random_deltas(3, 30)
    deltas[0] *= 5
    small = call(SCE, [d * 1e-9 for d in deltas])
    assert relative_error(small * 1e9, call(SCE, deltas)) < 1e-13
    assert relative_error(small * 1e9, sum(deltas) / 3) > 0.1


def test_equal_experts_and_zeros() -> None:
    (delta,) = random_deltas(1, 5, 4)
    assert relative_error(call(SCE, [delta] * 3), delta) < 1e-15
    assert float(call(SCE, [delta] * 3, select_topk=0.5).abs().sum()) == 0, "no entry differs, none is selected"
    assert float(call(SCE, [torch.zeros(5)] * 2).abs().sum()) == 0


def test_the_record_tells_the_largest_share() -> None:
    merged = SCE.merge([torch.tensor([3.0]), torch.tensor([1.0])], select_topk=1.0)
    assert merged.stats["largest_share"] == pytest.approx(0.9)
