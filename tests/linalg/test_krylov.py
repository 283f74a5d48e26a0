"""Leading eigenpairs against a full decomposition; adversarial spectra; what must be refused; the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import orthogonal, seeded
from tests.tolerances import F64_IDENTITY, F64_ORACLE, relative_error
from torch import Tensor

from actmat.linalg import krylov
from actmat.linalg.krylov import Leading, Wanted, leading, none_above

N = 600
BASIS_ROWS = orthogonal(N, 5)
CUT = 0.9e-3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in proportion to matrices of a test's size."""
    monkeypatch.setattr(krylov, "BLOCK", 8)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the bases whose eigenpairs were computed."""
    sizes: list[int] = []
    ritz = krylov._Basis.ritz
    monkeypatch.setattr(krylov._Basis, "ritz", lambda basis: (sizes.append(basis.size), ritz(basis))[1])
    return sizes


def symmetric(values: Tensor) -> Tensor:
    """`N x N` with these eigenvalues, exactly symmetric."""
    matrix = (BASIS_ROWS * values) @ BASIS_ROWS.mT
    return (matrix + matrix.mT) / 2


def decay(power: float) -> Tensor:
    return torch.arange(1, N + 1, dtype=torch.float64).pow(-power)


def padded(*leading_values: Tensor, rest: float = 0.0) -> Tensor:
    found = torch.cat([v.double() for v in leading_values])
    return torch.cat([found, torch.full((N - len(found),), rest, dtype=torch.float64)])


SPECTRA = {
    "steep": decay(3.0),
    "steeper, in random order": decay(4.0)[torch.randperm(N, generator=seeded(0))],
    "geometric": torch.logspace(0, -30, N, dtype=torch.float64),
    "one dominant, a flat rest below": padded(torch.ones(1), rest=0.9 * CUT),
    "rank one": padded(torch.ones(1)),
    "fewer than a block": padded(torch.linspace(1, 0.5, 5)),
    "rank deficient, no multiple of a block": padded(torch.linspace(1, 0.01, 61)),
    "some above, a far flat rest": padded(torch.linspace(1, 0.1, 40), rest=1e-9),
    "double just above": padded(torch.linspace(1, 0.1, 20), torch.full((2,), 1.001 * CUT), 0.5 * CUT * decay(2)[:300]),
    "negative by rounding": padded(torch.linspace(1, 0.1, 20), rest=-1e-15),
    "very small": 1e-200 * decay(3.0),
}


@pytest.mark.parametrize("name", list(SPECTRA))
def test_pairs_are_those_of_a_full_decomposition(name: str) -> None:
    sym_NN = symmetric(SPECTRA[name])
    found = leading(sym_NN, Wanted(CUT), torch.float64)
    assert isinstance(found, Leading), found
    values_N, vectors_NN = torch.linalg.eigh(sym_NN)
    kept = int((values_N > CUT * values_N[-1]).sum())
    assert found.values_K.numel() == kept
    assert relative_error(found.values_K, values_N[-kept:]) < F64_IDENTITY
    # single eigenvectors of close eigenvalues are not determined; their space is
    exact = vectors_NN[:, -kept:]
    assert relative_error(found.vectors_NK @ found.vectors_NK.mT, exact @ exact.mT) < F64_ORACLE
    residual = sym_NN @ found.vectors_NK - found.vectors_NK * found.values_K
    assert float(residual.abs().max()) < 1e-13 * float(values_N[-1])
    assert relative_error(found.vectors_NK.mT @ found.vectors_NK, torch.eye(kept, dtype=torch.float64)) < F64_IDENTITY


@pytest.mark.parametrize("apart", [0.0, 1e-15, 1e-12, 1e-9, 1e-5])
def test_a_crowd_at_the_cut_off_is_decided_by_the_computed_values(apart: float) -> None:
    """Ten eigenvalues at the cut-off, closer than any proof could tell apart: all ten are computed, as by `eigh`."""
    crowd = CUT * (1 + apart * torch.linspace(1, -1, 10, dtype=torch.float64))
    sym_NN = symmetric(padded(torch.linspace(1, 0.1, 20), crowd, rest=0.1 * CUT))
    found = leading(sym_NN, Wanted(CUT), torch.float64)
    assert isinstance(found, Leading), found
    assert 20 <= found.values_K.numel() <= 30
    exact = torch.linalg.eigvalsh(sym_NN)
    assert relative_error(found.values_K, exact[-found.values_K.numel() :]) < F64_IDENTITY
    if apart > 1e-12:
        assert found.values_K.numel() == 25


def test_more_copies_than_a_block_holds_are_never_lost_in_silence() -> None:
    sym_NN = symmetric(padded(torch.ones(1), torch.full((3 * krylov.BLOCK,), 0.5)))
    found = leading(sym_NN, Wanted(CUT), torch.float64)
    if isinstance(found, Leading):
        assert found.values_K.numel() == 1 + 3 * krylov.BLOCK
    else:
        assert found


def test_a_basis_that_misses_a_direction_is_refused_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exact pair is taken away from every look, as if the start had had no component in it."""
    ritz = krylov._Basis.ritz

    def without_one(basis: krylov._Basis) -> krylov._Ritz:
        seen = ritz(basis)
        others = torch.arange(len(seen.values_J)) != 3
        parts = (seen.values_J, seen.coordinates_JJ.mT, seen.residuals_J, seen.counts_J)
        values, coordinates, residuals, counts = (part[others] for part in parts)
        return krylov._Ritz(values, coordinates.mT, residuals, counts)

    monkeypatch.setattr(krylov._Basis, "ritz", without_one)
    assert leading(symmetric(decay(3.0)), Wanted(CUT), torch.float64) is None


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        (torch.ones(N, dtype=torch.float64), [krylov.EARLY_CHECK]),
        (torch.linspace(0.99 * CUT, 1, N, dtype=torch.float64), [krylov.EARLY_CHECK]),
        (decay(1.2), [krylov.EARLY_CHECK, krylov.FIRST_LOOK]),
        (torch.zeros(N, dtype=torch.float64), [krylov.EARLY_CHECK, krylov.FIRST_LOOK]),
    ],
    ids=["flat", "one is not kept", "slow decay", "zero"],
)
def test_what_is_not_worth_it_is_refused_after_the_first_look(
    values: Tensor, blocks: list[int], looks: list[int]
) -> None:
    assert leading(symmetric(values), Wanted(CUT), torch.float32) is None
    assert looks == [count * krylov.BLOCK for count in blocks]


LARGEST = {
    "steep": (decay(3.0), 60),
    "slow": (decay(0.8), 40),
    "slow, on a flat rest": (decay(1.0) + 0.01, 30),
    "exponential": (torch.exp(-torch.arange(N, dtype=torch.float64) / 30), 75),
    "one": (decay(1.0), 1),
    "a crowd at the last": (padded(torch.linspace(1, 0.1, 20), torch.full((4,), 0.05), 0.01 * decay(2)[:300]), 22),
}


@pytest.mark.parametrize("name", list(LARGEST))
def test_so_many_largest_pairs_are_those_of_a_full_decomposition(name: str) -> None:
    values, count = LARGEST[name]
    sym_NN = symmetric(values)
    found = leading(sym_NN, Wanted(1e-12, count, count), torch.float64)
    assert isinstance(found, Leading), found
    values_N, vectors_NN = torch.linalg.eigh(sym_NN)
    assert found.values_K.numel() == count
    assert relative_error(found.values_K, values_N[-count:]) < F64_IDENTITY
    if name != "a crowd at the last":  # of which any two are right
        exact = vectors_NN[:, -count:]
        assert relative_error(found.vectors_NK @ found.vectors_NK.mT, exact @ exact.mT) < F64_ORACLE


@pytest.mark.parametrize(("share", "floor", "rank"), [(1e-11, 0.0, 25), (1e-12, 0.5, 13), (0.25, 0.0, 19)])
def test_no_pair_below_the_share_or_the_floor_is_among_the_largest(share: float, floor: float, rank: int) -> None:
    """25 eigenvalues from 1 to 0.01, one a 24th below the other, where 40 are asked for."""
    sym_NN = symmetric(padded(torch.linspace(1, 0.01, 25)))
    found = leading(sym_NN, Wanted(share, 40, 40, floor), torch.float64)
    assert isinstance(found, Leading), found
    assert found.values_K.numel() == rank


@pytest.mark.parametrize(
    ("values", "count"),
    [
        (torch.linspace(1, 0, N, dtype=torch.float64), 30),
        (torch.ones(N, dtype=torch.float64), 10),
        (decay(0.1), 80),
        (padded(torch.linspace(100, 50, 20), torch.linspace(1, 0.1, N - 20)), 60),
    ],
    ids=["line", "all alike", "hardly falls", "some large ones on a line"],
)
def test_flat_spectra_are_refused_after_the_first_look(values: Tensor, count: int, looks: list[int]) -> None:
    assert leading(symmetric(values), Wanted(1e-12, count, count), torch.float32) is None
    assert looks == [krylov.EARLY_CHECK * krylov.BLOCK, krylov.FIRST_LOOK * krylov.BLOCK]


def test_what_no_proof_tells_from_rounding_is_refused_after_the_first_look() -> None:
    sym_NN = symmetric(padded(torch.linspace(1, 0.01, 25)))
    assert leading(sym_NN, Wanted(1e-13, 40, 40), torch.float64) is None


def test_what_is_known_to_be_too_many_is_refused_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 vectors are worth it: 2.2 for each of 110 directions, and the first look."""
    sym_NN = symmetric(decay(3.0))
    assert isinstance(leading(sym_NN, Wanted(CUT, 110), torch.float64), Leading)
    monkeypatch.setattr(krylov, "_Basis", None)
    for wanted in (Wanted(CUT, 111), Wanted(0.0, 111, 111)):
        assert leading(sym_NN, wanted, torch.float64) is None


def test_a_basis_that_grows_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch, looks: list[int]) -> None:
    monkeypatch.setattr(krylov, "LIMIT", 0.3)
    crowded = padded(torch.ones(1), torch.linspace(1.5, 0.5, 300, dtype=torch.float64) * CUT)
    monkeypatch.setattr(krylov, "BASIS_PER_PAIR", 0.2)
    assert leading(symmetric(crowded), Wanted(CUT), torch.float64) is None
    assert looks[-1] == int(0.3 * N) // krylov.BLOCK * krylov.BLOCK


def test_a_crowd_just_below_the_cut_off_is_given_up_early(looks: list[int]) -> None:
    """Without a gap, residuals fall slowly: the attempt ends soon after the size that five pairs usually need."""
    crowded = padded(torch.linspace(1, 1.001 * CUT, 5), torch.linspace(0.999, 0.0, 595) * CUT)
    assert leading(symmetric(crowded), Wanted(CUT), torch.float64) is None
    assert looks[-1] <= 2 * krylov._expected(5)


@settings(max_examples=60)
@given(
    exponents=st.lists(st.floats(-9, 0), min_size=2, max_size=10),
    known=st.integers(0, 9),
    level=st.floats(-9, 0.1),
    seed=st.integers(0, 5),
)
def test_a_proof_is_never_wrong(exponents: list[float], known: int, level: float, seed: int) -> None:
    """Whatever is known, right or wrong: where it is proven, no more eigenvalues than that are above the level."""
    values = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    basis = orthogonal(len(values), seed)
    sym_NN = (basis * values) @ basis.mT
    known = min(known, len(values))
    if none_above((sym_NN + sym_NN.mT) / 2, values[:known], basis[:, :known].mT, 10.0**level):
        assert int((values >= 10.0**level).sum()) <= known


def test_a_proof_needs_every_direction_and_right_vectors() -> None:
    values = padded(torch.linspace(1, 0.1, 20), rest=1e-6)
    sym_NN, vectors_KN = symmetric(values), BASIS_ROWS[:, :20].mT.contiguous()
    assert none_above(sym_NN, values[:20], vectors_KN, 0.05)
    assert not none_above(sym_NN, values[:19], vectors_KN[:19], 0.05)
    assert not none_above(sym_NN, values[:20], torch.roll(vectors_KN, 10, 0), 0.05)
    assert not none_above(sym_NN, values[:20], vectors_KN, 1e-6)
