"""TSV-M against a transcription of the paper's equations."""

import torch
from tests.helpers.spectra import random_deltas, random_lowrank, with_spectrum
from tests.tolerances import relative_error

from actmat.extras.research.tsv import merge


def naive(deltas, k=None):
    """Full SVDs in float64, `k` triplets each, whitening by the SVD of the concatenated vectors."""
    k = min(deltas[0].shape) // len(deltas) if k is None else k
    us, ss, vs = [], [], []
    for delta in deltas:
        u, s, vh = torch.linalg.svd(delta.double(), full_matrices=False)
        us.append(u[:, :k])
        ss.append(s[:k])
        vs.append(vh[:k].mT)
    (pu, _, qu), (pv, _, qv) = (torch.linalg.svd(torch.cat(x, 1), full_matrices=False) for x in (us, vs))
    return (pu @ qu) @ torch.diag(torch.cat(ss)) @ (pv @ qv).mT


def test_k_is_capped_at_each_experts_rank():
    deltas = [with_spectrum(12, 15, [3.0, 2.0], seed=1), with_spectrum(12, 15, [5.0, 4.0, 3.0, 2.0, 1.0], seed=2)]
    merged = merge(deltas)
    assert merged.stats == {"k": 6, "rank_min": 2, "rank_max": 5}
    # The same triplets, taken out by hand: k = 2 of the first, 5 of the second.
    u, s, v = zip(*[torch.linalg.svd(d) for d in deltas], strict=True)
    left, right = torch.cat([u[0][:, :2], u[1][:, :5]], 1), torch.cat([v[0][:2], v[1][:5]], 0).mT
    (pu, _, qu), (pv, _, qv) = (torch.linalg.svd(x, full_matrices=False) for x in (left, right))
    assert relative_error(merged.value, (pu @ qu) @ torch.diag(torch.cat([s[0][:2], s[1][:5]])) @ (pv @ qv).mT) < 1e-12


def test_without_the_cap_null_vectors_enter_as_published():
    deltas = [d.dense() for d in random_lowrank([2, 2], 8, 8)]
    assert relative_error(merge(deltas, rank_aware=False).value, naive(deltas)) < 1e-11
    assert relative_error(merge(deltas).value, naive(deltas)) > 1e-2


def test_a_zero_expert_takes_its_slots_and_contributes_nothing():
    deltas = random_deltas(2, 12, 15)
    with_zero = merge([deltas[0], torch.zeros(12, 15, dtype=torch.float64), deltas[1]])
    assert relative_error(with_zero.value, merge(deltas, k=4).value) < 1e-13


def test_more_experts_than_directions():
    deltas = random_deltas(4, 3, 10)
    published = merge(deltas)
    assert published.stats["k"] == 0
    assert not published.value.any()
    assert published.value.shape == (3, 10)
    kept = merge(deltas, min_k=1)
    assert kept.stats["k"] == 1
    assert relative_error(kept.value, naive(deltas, k=1)) < 1e-12


def test_k_beyond_the_matrix_is_all_of_it():
    deltas = random_deltas(2, 5, 9)
    assert relative_error(merge(deltas, k=99).value, naive(deltas, k=5)) < 1e-12
    assert not merge(deltas, k=0).value.any()
