"""AdaMerging: the weighted sum with coefficients that were learned elsewhere."""

from __future__ import annotations

import pytest
from tests.helpers.experts import Experts
from tests.tolerances import relative_error

from actmat.extras.research.adamerging import merge


@pytest.fixture
def experts() -> Experts:
    return Experts.random(3, (5, 7))


def test_coefficients_given_and_initial(experts: Experts) -> None:
    d = experts.deltas
    assert relative_error(merge(d).value, 0.3 * (d[0] + d[1] + d[2])) < 1e-15
    assert relative_error(merge(d, coefficients=[1.0, 0.0, -2.0]).value, d[0] - 2 * d[2]) < 1e-15


def test_one_per_expert(experts: Experts) -> None:
    with pytest.raises(ValueError, match="2 coefficients for 3 experts"):
        merge(experts.deltas, coefficients=[1.0, 1.0])
