"""The estimate against what a merge really allocates, LAPACK's work space included."""

import weakref

import pytest
import torch
from tests.helpers.memory import peak_bytes
from tests.helpers.spectra import random_deltas, shared_rows, with_spectrum

from actmat.linalg import krylov
from actmat.linalg.interference import moments, spectral_solve
from actmat.linalg.interference.cost import workspace
from actmat.linalg.interference.rule import Estimator, Filter, InterferenceRule
from actmat.linalg.interference.solver import finish, prepare


def peak_of(deltas, rule):
    """Largest number of elements (of float32) alive in a merge, LAPACK's work space included, and its record."""
    stats = {}
    return peak_bytes(lambda: stats.update(finish(prepare(deltas, rule), rule, consume=True)[1])) / 4, stats


CASES = {
    "eigh": (InterferenceRule(solver="eigh"), (3, 96, 64)),
    "eigh, wide": (InterferenceRule(solver="eigh"), (3, 48, 200)),
    "hard": (InterferenceRule(), (3, 64, 64)),
    "hard, tall": (InterferenceRule(), (3, 400, 64)),
    "ridge": (InterferenceRule(spectral=Filter("tikhonov")), (3, 64, 64)),
    "filled": (InterferenceRule(null="sum"), (3, 128, 64)),
    "dual": (InterferenceRule(), (2, 16, 128)),
    "stacked": (InterferenceRule(solver="stacked"), (2, 64, 64)),
    "trimmed": (InterferenceRule(Estimator(trim=0.5)), (2, 256, 64)),
    "very tall": (InterferenceRule(), (2, 3000, 16)),
    "normalized": (InterferenceRule(Estimator(normalize="norm")), (2, 3000, 16)),
    "normalized, dual": (InterferenceRule(Estimator(normalize="norm")), (2, 16, 128)),
}


@pytest.mark.parametrize("size", [1.0, 2.0**-40], ids=["near 1", "far from 1"])
@pytest.mark.parametrize("name", list(CASES))
def test_estimate_covers_what_is_allocated_and_is_not_far_above(name, size):
    rule, (n_experts, *shape) = CASES[name]
    deltas = [d.float() * size for d in random_deltas(n_experts, *shape)]
    (allocated, _), estimate = peak_of(deltas, rule), workspace(shape, n_experts, rule)
    assert allocated <= estimate + 8  # scalars
    assert allocated >= 0.3 * estimate  # the rest: the dearer path the data did not take


@pytest.mark.parametrize(("shape", "solver"), [((256, 256), "eigh"), ((128, 512), "eigh"), ((64, 512), "dual")])
def test_the_whole_spectrum_with_lapacks_work_takes_no_more_than_the_estimate(shape, solver):
    deltas, rule = (
        [d.float() for d in random_deltas(3, *shape)],
        InterferenceRule(solver=solver, spectral=Filter("adaptive")),
    )
    assert 0.9 * workspace(shape, 3, rule) <= peak_of(deltas, rule)[0] <= workspace(shape, 3, rule)


def test_a_part_of_the_spectrum_takes_no_more_than_the_whole(monkeypatch):
    """The basis, its projection and the proof fit into the memory of a full decomposition."""
    monkeypatch.setattr(krylov, "BLOCK", 8)
    monkeypatch.setattr(moments, "SMALLEST", 64)
    values = torch.arange(1, 301, dtype=torch.float64).pow(-1.5)
    deltas, rule = [with_spectrum(300, 560, values, seed=t).float() for t in range(2)], InterferenceRule()
    peak, stats = peak_of(deltas, rule)
    assert stats["solver"] == "primal/lanczos"
    assert peak <= workspace((300, 560), 2, rule)


def test_the_inverse_without_few_directions_takes_no_more_than_the_whole_spectrum(monkeypatch):
    monkeypatch.setattr(krylov, "BLOCK", 8)
    monkeypatch.setattr(spectral_solve, "SMALLEST", 64)
    deltas, rule = [d.float() for d in random_deltas(3, 189, 560)], InterferenceRule()
    peak, stats = peak_of(deltas, rule)
    assert stats["solver"] == "primal/inverse"
    assert peak <= workspace((189, 560), 3, rule)


@pytest.mark.parametrize("sizes", [(1e-12,), (1e12,), (1e-12, 1.0), (1.0, 1e-12), (1e-15, 1e15)], ids=str)
@pytest.mark.parametrize("name", [*CASES, "hard, very tall"])
def test_deltas_far_from_one_take_two_copies_of_a_delta_more(name, sizes):
    """They are brought near 1, which headers do not show; if counted, all other plans would be far too high."""
    rule, (n_experts, *shape) = (CASES | {"hard, very tall": (InterferenceRule(), (3, 20000, 16))})[name]
    deltas = [sizes[t % len(sizes)] * d.float() for t, d in enumerate(random_deltas(n_experts, *shape))]
    copies = 2 * shape[0] * shape[1]
    assert peak_of(deltas, rule)[0] <= workspace(shape, n_experts, rule) + copies


def test_peak_does_not_grow_with_the_number_of_experts():
    assert workspace((64, 64), 3, InterferenceRule()) == workspace((64, 64), 30, InterferenceRule())
    peaks = []
    for count in (2, 8):
        deltas = random_deltas(count, 64, 64, dtype=torch.float32)
        peaks.append(peak_of(deltas, InterferenceRule(solver="eigh"))[0])
    assert peaks[0] == peaks[1]


def test_batches_are_solved_one_at_a_time():
    """Beside what must be kept of every item (B and S), one item's solve, not eight: nor its eigenvectors."""
    rule = InterferenceRule(solver="eigh")
    one, eight = workspace((64, 64), 2, rule), workspace((8, 64, 64), 2, rule)
    assert eight - one == 7 * 2 * 64 * 64
    deltas = [torch.stack([d.float()] * 8) for d in shared_rows(2, 64, 1e-5)]
    assert peak_of(deltas, rule)[0] <= eight


def test_given_grams_take_the_primal_form_whatever_the_shape():
    wide = (4, 128)
    assert workspace(wide, 2, InterferenceRule(), has_grams=True) >= 4 * 128 * 128
    assert workspace(wide, 2, InterferenceRule()) < 128 * 128


@pytest.mark.parametrize(
    "rule",
    [InterferenceRule(), InterferenceRule(solver="dual"), InterferenceRule(null="sum")],
    ids=["primal", "dual", "filled"],
)
def test_a_spent_problem_frees_its_gram_matrix_and_the_answer_stays(rule):
    deltas = [d.float() for d in random_deltas(2, 48, 64)]
    kept = finish(prepare(deltas, rule), rule)
    state = prepare(deltas, rule)
    (reduced,) = state.items
    assert reduced.gram_NN is not None
    spent = finish(state, rule, consume=True)
    needs_gram = rule.null == "sum" and reduced.right_NI is None  # to take the fill out of the numerator
    assert (reduced.gram_NN is not None) == needs_gram
    assert torch.equal(kept[0], spent[0])
    assert kept[1] == spent[1]


def test_nothing_of_a_delta_is_alive_when_the_sums_are_finished(monkeypatch):
    """One made by a reader for the method alone, as the engine's are."""

    class Read:
        def __init__(self):
            self.alive = []

        def __len__(self):
            return 2

        def __getitem__(self, t):
            delta = random_deltas(2, 24, 64)[t].float()
            self.alive.append(weakref.ref(delta.untyped_storage()))
            return delta

    read, seen = Read(), []
    for kind in (moments.PrimalMoments, moments.StackedMoments):
        reduced = kind.reduced

        def watched(self, reduced=reduced):
            seen.append([storage() for storage in read.alive])
            return reduced(self)

        monkeypatch.setattr(kind, "reduced", watched)
    prepare(read, InterferenceRule())
    prepare(read, InterferenceRule(solver="eigh"))
    assert seen == [[None] * 2, [None] * 4]
