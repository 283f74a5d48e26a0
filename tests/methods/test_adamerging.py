"""AdaMerging: the weighted sum, and one training step against autograd and torch's own Adam."""

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import relative_error

from actmat.extras.research.adamerging import merge


@pytest.fixture
def experts() -> Experts:
    return Experts.random(3, (5, 7))


def test_coefficients_from_each_source(experts: Experts) -> None:
    d = experts.deltas
    assert relative_error(merge(d).value, 0.3 * (d[0] + d[1] + d[2])) < 1e-15
    assert relative_error(merge(d, coefficients=[1.0, 0.0, -2.0]).value, d[0] - 2 * d[2]) < 1e-15
    learned = {"coefficient": [torch.tensor(c) for c in (0.5, 0.25, 2.0)]}
    assert relative_error(merge(d, statistics=learned).value, 0.5 * d[0] + 0.25 * d[1] + 2 * d[2]) < 1e-15


def test_one_source_and_one_per_expert(experts: Experts) -> None:
    with pytest.raises(ValueError, match="not both"):
        merge(experts.deltas, coefficients=[1.0] * 3, statistics={"coefficient": [torch.tensor(1.0)] * 3})
    with pytest.raises(ValueError, match="2 coefficients for 3 experts"):
        merge(experts.deltas, coefficients=[1.0, 1.0])
