"""Readings of the interference solver's moments: Grams of many factors, coordinates in `S`."""

from typing import Literal

import pytest
import torch
from tests.tolerances import F64_ORACLE, relative_error

from actmat.linalg.gram import GRAM_COLUMNS, PANELLED_FROM, column_gram, gram_panels
from actmat.linalg.interference.moments import PrimalMoments, Reduced, StackedMoments


def factors(count: int, rows: int, width: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(rows + width)
    return [torch.randn(rows, width, generator=rng, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("width", [1, 511, 512, 1279, 1280, 5632])
def test_gram_panels_cover_the_columns_once(width: int) -> None:
    found = gram_panels(width)
    assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])]
    assert found[-1].stop == width
    assert len(found) == (1 if width < 512 else max(4, width // 256))


@pytest.mark.parametrize("width", [7, PANELLED_FROM + 3, 8 * GRAM_COLUMNS + 5])
def test_column_gram_is_the_product(width: int) -> None:
    stacked = torch.cat(factors(3, 5, width))
    assert relative_error(column_gram(stacked), stacked.mT @ stacked) < F64_ORACLE


def reduced(form: Literal["primal", "dual", "stacked"], given: list[torch.Tensor]) -> Reduced:
    rows, width = given[0].shape
    if form == "primal":
        moments = PrimalMoments(torch.empty(rows, width).double(), torch.empty(width, width).double())
        for delta in given:
            moments.add(delta, delta, 1.0)
        return moments.reduced()
    stacked = StackedMoments(form, rows, len(given), rows, given[0])
    for delta in given:
        stacked.add(delta, delta, 1.0)
    return stacked.reduced()


@pytest.mark.parametrize("form", ["primal", "dual", "stacked"])
def test_coordinates_in_the_leading_eigenvectors(form: Literal["primal", "dual", "stacked"]) -> None:
    given = factors(2, 4, 11)
    gram = column_gram(torch.cat(given))
    vectors = torch.linalg.eigh(gram).eigenvectors
    for count in (1, 3, 8):
        found = reduced(form, given).coordinates(given[0], count)
        expected = given[0] @ vectors[:, -count:]
        # signs of eigenvectors are free: compare what the coordinates say of the rows
        assert relative_error(found @ found.mT, expected @ expected.mT) < F64_ORACLE
