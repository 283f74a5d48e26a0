"""RAM entry by entry, against its definition in plain Python."""

import pytest
import torch
from tests.helpers.experts import Experts
from torch import Tensor

from actmat.extras.research.ram import merge

EPSILON = 0.07


def plain(deltas: list[Tensor], amplify: float, most: float) -> Tensor:
    flat = [d.flatten().tolist() for d in deltas]
    changed = [[abs(v) > EPSILON for v in row] for row in flat]
    counts = [sum(column) for column in zip(*changed, strict=True)]
    factors = []
    for row in changed:
        alone = sum(c and n == 1 for c, n in zip(row, counts, strict=True))
        shared = sum(c and n > 1 for c, n in zip(row, counts, strict=True))
        factors.append(1 + amplify * min(shared / max(alone, EPSILON), most))
    out = []
    for i, n in enumerate(counts):
        values = [(row[i], f) for row, mask, f in zip(flat, changed, factors, strict=True) if mask[i]]
        out.append(values[0][0] * values[0][1] if n == 1 else sum(v for v, _ in values) / max(n, 1))
    return torch.tensor(out, dtype=torch.float64).reshape(deltas[0].shape)


@pytest.mark.parametrize(("amplify", "most"), [(0.0, 0.2), (0.1, 0.2), (0.5, 100.0)])
def test_each_entry_is_shared_or_of_one_expert(amplify: float, most: float) -> None:
    deltas = Experts.random(3, (7, 9)).deltas
    counts = sum((d.abs() > EPSILON).int() for d in deltas)
    assert {0, 1, 2} <= set(counts.flatten().tolist()), "all cases occur"
    found = merge(deltas, epsilon=EPSILON, amplify=amplify, most=most)
    torch.testing.assert_close(found.value, plain(deltas, amplify, most), rtol=0, atol=1e-12)
    assert found.stats["shared_fraction"] == pytest.approx(float((counts > 1).double().mean()))


def test_an_expert_without_entries_of_its_own() -> None:
    """Two experts that changed the same entries are averaged, whatever `amplify` is."""
    delta = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    found = merge([delta, 3 * delta], amplify=1.0, epsilon=0.0)
    assert found.value.tolist() == [2.0, -4.0, 0.0]
