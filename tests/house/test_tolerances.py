"""The tolerances mean what they say: ordered by precision, above the arithmetic's noise, far below a real error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import tolerances
from tests.tolerances import (
    BF16_ROUNDING,
    F16_ROUNDING,
    F32_ELEMENTWISE,
    F32_PRODUCT,
    F32_SOLVE,
    F64_IDENTITY,
    F64_ORACLE,
    OWN,
    bare_tolerances,
    own_tolerances,
    relative_error,
)


def test_they_are_ordered() -> None:
    assert F64_IDENTITY < F64_ORACLE < F32_ELEMENTWISE < F32_PRODUCT < F32_SOLVE < F16_ROUNDING < BF16_ROUNDING


TESTS = Path(tolerances.__file__).parent


def test_numbers_without_a_name_are_no_looser_and_no_more_than_listed() -> None:
    """Whoever adds or loosens one changes `OWN` in tests/tolerances.py, where a reviewer sees it."""
    found = own_tolerances(TESTS)
    looser = [
        f"{name}: {count} bare tolerances, the loosest {worst:g}; listed: {OWN.get(name, 'none')}"
        for name, (count, worst) in found.items()
        if name not in OWN or count > OWN[name][0] or worst > OWN[name][1]
    ]
    assert not looser, "use a name of tests/tolerances.py, or change OWN there:\n" + "\n".join(looser)
    assert not set(OWN) - set(found), "these files have none any more: take them out of OWN"


def test_what_counts_as_a_bare_tolerance() -> None:
    source = (
        "assert error(a, b) < 1e-9\nassert 1e-3 < x < 2\nassert y == approx(z, rel=0.01, abs=1e-11)\n"
        "assert error(a, b) < F32_SOLVE\nassert p < 0.5\ntorch.allclose(a, b, rtol=1e-4, atol=1e-6)\n"
    )
    assert sorted(bare_tolerances(source)) == [1e-9, 1e-6, 1e-4, 0.01]


def test_every_one_has_a_reason() -> None:
    with open(tolerances.__file__) as file:
        source = file.read()
    for name in tolerances.NAMES:
        assert f"\n{name} = " in source
        assert source.split(f"\n{name} = ")[1].splitlines()[1].startswith('"""'), name


@pytest.mark.parametrize(("kind", "bound"), [(torch.bfloat16, BF16_ROUNDING), (torch.float16, F16_ROUNDING)])
def test_one_rounding_stays_inside(kind: torch.dtype, bound: float) -> None:
    value = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) + 0.5
    rounded = value.to(kind).float()
    assert ((rounded - value).abs() <= bound * value.abs()).all()
    assert relative_error(rounded, value) > bound / 16


def test_relative_error() -> None:
    expected = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(expected * 1.5, expected) == pytest.approx(0.5)
    assert relative_error(expected, torch.zeros(2, 2)) == pytest.approx(5.0)
    assert relative_error(torch.full((1,), torch.nan), torch.ones(1)) != relative_error(torch.ones(1), torch.ones(1))
    with pytest.raises(AssertionError, match="shape"):
        relative_error(torch.zeros(1, 2), torch.zeros(2))
