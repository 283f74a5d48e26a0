from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from tests.helpers.masking import awkward_deltas, call
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error
from torch import Tensor

from actmat.extras.research.sce import SCE


def naive_sce(deltas: Sequence[Tensor], fraction: float) -> Tensor:
    columns = torch.stack([d.reshape(-1) for d in deltas]).T.tolist()
    if fraction < 1:
        variances = []
        for column in columns:
            mean = math.fsum(column) / len(column)
            variances.append(math.fsum((x - mean) ** 2 for x in column) / len(column))
        order = sorted(range(len(columns)), key=lambda i: (-variances[i], i))
        chosen = set(order[: int(fraction * sum(v > 1e-25 for v in variances))])
        columns = [c if i in chosen else [0.0] * len(c) for i, c in enumerate(columns)]
    energies = [math.fsum(c[t] ** 2 for c in columns) for t in range(len(deltas))]
    out = []
    for column in columns:
        sign = 1 if math.fsum(column) >= 0 else -1
        agreeing = [t for t, x in enumerate(column) if x * sign > 0]
        divisor = math.fsum(energies[t] for t in agreeing)
        out.append(math.fsum(energies[t] * column[t] for t in agreeing) / (divisor or 1.0))
    return torch.tensor(out, dtype=deltas[0].dtype).view(deltas[0].shape)


@pytest.mark.parametrize("fraction", [1.0, 0.7, 0.2])
@pytest.mark.parametrize("n_experts", [1, 2, 4])
def test_naive_transcription(fraction: float, n_experts: int) -> None:
    deltas = random_deltas(n_experts, 9, 7)
    assert relative_error(call(SCE, deltas, select_topk=fraction), naive_sce(deltas, fraction)) < 1e-14


def test_exact_cancellation_elects_plus() -> None:
    deltas = awkward_deltas(2, 200)
    assert relative_error(call(SCE, deltas), naive_sce(deltas, 1.0)) < 1e-14


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
