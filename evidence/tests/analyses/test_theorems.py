"""Theorems 3.1 and 3.2 of the paper: the terms against naive sums, and the analyses themselves."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.analyses import gaussian
from evidence.tests.helpers.tokens import naive_sums
from evidence.tests.helpers.tolerances import F64_IDENTITY, F64_ORACLE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from actmat.errors import NumericalError, RecipeError
from actmat_experiments.analyses.angles import RIGHT_ANGLE, angle, gram_of
from actmat_experiments.analyses.drift import ROUNDING, moments_until
from actmat_experiments.analyses.printed import printed_lemma
from actmat_experiments.analyses.theorem1 import ACTIVATIONS, MLP, descend_watched, new_mlp, theorem1
from actmat_experiments.analyses.theorem2 import (
    Sample,
    best_scale,
    least_interference,
    merge_mlps,
    theorem2,
    transfer_bound,
)

# Theorem 3.1 as an inequality over many random problems, with one token per sample and with several.


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    activation=st.sampled_from(["relu", "tanh"]),
    n_samples=st.integers(1, 12),
    n_steps=st.integers(1, 6),
    width=st.integers(1, 6),
    rate=st.sampled_from([0.01, 0.1, 0.5]),
)
def test_the_inequality_holds_on_random_problems(seed, activation, n_samples, n_steps, width, rate):
    model = new_mlp((4, width, 3), activation=activation, seed=seed)
    x, y = gaussian(n_samples, 4, seed=seed), torch.arange(n_samples) % 3
    _, moments = descend_watched(model, lambda: nn.functional.cross_entropy(model(x), y), n_steps=n_steps, rate=rate)
    for moment in moments:
        first = moment.layers["linear.0.weight"]
        for found in moment.layers.values():
            terms = (found.estimate, found.cross, found.correlation, found.drift)
            if any(map(math.isnan, terms)):  # a layer of dead units has no gradient
                continue
            assert found.estimate <= found.bound + ROUNDING
            assert found.optimizer < 1e-6
            assert all(0 <= term <= RIGHT_ANGLE + F64_IDENTITY for term in terms)
        assert math.isnan(first.drift) or first.drift < 1e-7  # the first layer's inputs never change


def test_the_delta_is_the_summed_gradient_and_all_terms_are_those_of_a_plain_account():
    model, x, y = new_mlp((5, 4, 3), seed=2), gaussian(7, 5), torch.arange(7) % 3
    start, plain = copy.deepcopy(model), copy.deepcopy(model)
    monitor, moments = descend_watched(model, lambda: nn.functional.cross_entropy(model(x), y), n_steps=5, rate=0.3)
    steps = []
    for _ in range(5):
        z = torch.relu(plain.linear[0](x))
        out = plain.linear[1](z)
        out.retain_grad()
        plain.zero_grad()
        nn.functional.cross_entropy(out, y).backward()
        steps.append((z.detach(), out.grad))
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.3 * p.grad
    sums = naive_sums(steps)
    delta = model.linear[1].weight.detach() - start.linear[1].weight.detach()
    assert relative_error(delta, -0.3 * monitor.sums("linear.1.weight")["gradient"]) < F64_ORACLE
    z = torch.relu(plain.linear[0](x)).detach()
    gram = z.mT @ z / 7
    found = moments[-1].layers["linear.1.weight"]
    assert found.estimate == pytest.approx(angle(gram_of(delta), gram), abs=1e-9)
    assert found.cross == pytest.approx(angle(gram_of(sums["gradient"]), sums["second"]), abs=1e-9)
    assert found.correlation == pytest.approx(angle(sums["second"], sums["decoupled"]), abs=1e-9)
    assert found.drift == pytest.approx(angle(sums["decoupled"], gram), abs=1e-9)


def test_one_sample_and_one_step_have_no_error():
    """`D = -eta g z^T`: its Gram matrix is `z z^T` up to scale, and so are S, S~ and C of the first layer."""
    model, x = new_mlp((4, 3), seed=0), gaussian(1, 4)
    _, moments = descend_watched(model, lambda: model(x).square().sum(), n_steps=1, rate=0.1)
    found = moments[-1].layers["linear.0.weight"]
    assert max(found.estimate, found.cross, found.correlation, found.drift, found.optimizer) < 1e-7
    assert found.identity > 0.5


def test_a_layer_that_gets_no_gradient_has_no_angles():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.dead = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    model, x = Unused(), gaussian(4, 3)
    _, moments = descend_watched(model, lambda: (model.used(x) + 0 * model.dead(x)).square().sum(), n_steps=2, rate=0.1)
    assert math.isnan(moments[-1].layers["dead.weight"].estimate)
    assert not math.isnan(moments[-1].layers["used.weight"].estimate)


def test_a_diverging_descent_is_an_error_that_says_what_to_do():
    model, x = new_mlp((4, 3, 2), seed=0), gaussian(5, 4)
    with pytest.raises(NumericalError, match=r"smaller rate than 1000000\.0"):
        descend_watched(model, lambda: model(x).square().mul(1e6).exp().sum(), n_steps=50, rate=1e6)


@pytest.mark.parametrize("network", ["mlp", "transformer"])
def test_the_analysis_itself(network):
    pytest.importorskip("sklearn")
    result = theorem1(network=network, n_steps=3, n_images=20, width=8, rate=0.05)
    assert result.worst_excess() <= ROUNDING
    assert [m.step for m in result.moments] == [1, 2, 3]
    assert result.last.loss < result.moments[0].loss
    assert len(result.last.layers) == (3 if network == "mlp" else 13)
    again = theorem1(network=network, n_steps=3, n_images=20, width=8, rate=0.05)
    assert result.to_json() == again.to_json()


def test_moments_are_spread_evenly_on_a_logarithmic_scale():
    assert moments_until(1000, 4) == [1, 10, 100, 1000]
    assert moments_until(5, 12) == [1, 2, 3, 4, 5]
    assert moments_until(1) == [1]
    assert moments_until(7, 1) == [7]


# Theorem 3.3 over many random networks: every inequality of the derivation, and a case where the bound is attained.


def near(base: MLP, seed: int, size: float = 0.3) -> MLP:
    """An expert: the base with a random change."""
    expert = copy.deepcopy(base)
    with torch.no_grad():
        for i, p in enumerate(expert.parameters()):
            p += size * gaussian(*p.shape, seed=seed + i)
    return expert


def entropy_sample(n, n_in, n_classes, seed):
    labels = torch.arange(n) % n_classes
    return Sample(
        gaussian(n, n_in, seed=seed),
        lambda y: nn.functional.cross_entropy(y, labels, reduction="none"),
        math.sqrt(2),
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    depth=st.integers(1, 4),
    n_tasks=st.integers(1, 4),
    n_samples=st.integers(2, 12),
    method=st.sampled_from(["actmat", "average", "task_arithmetic"]),
)
@example(seed=0, activation="relu", depth=3, n_tasks=1, n_samples=2, method="actmat")  # nothing reaches the last layer
@example(seed=0, activation="tanh", depth=3, n_tasks=1, n_samples=4, method="average")  # inputs nearly in a plane
def test_every_inequality_holds_on_random_networks(seed, activation, depth, n_tasks, n_samples, method):
    """Also for merges that are not the minimizer, whose residual then counts."""
    base = new_mlp([3, *[4] * (depth - 1), 3], activation=activation, seed=seed)
    experts = [near(base, seed + 10 * t) for t in range(n_tasks)]
    samples = {f"t{t}": entropy_sample(n_samples, 3, 3, seed + t) for t in range(n_tasks)}
    result = transfer_bound(base, experts, merge_mlps(base, experts, method), samples)
    result.check()
    assert result.left <= result.propagated * (1 + 1e-9) + 1e-12
    assert result.propagated <= result.right * (1 + 1e-9) + 1e-12
    assert result.propagated <= result.printed * (1 + 1e-9) + 1e-12
    assert len(result.layers) == depth


def low_rank_grams(n_tasks, width, rank, seed):
    inputs = [gaussian(rank, width, seed=seed + t) for t in range(n_tasks)]
    return [z.mT @ z for z in inputs]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_tasks=st.integers(1, 4),
    ranks=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_printed_lemmas_hold_also_where_sums_are_singular(seed, n_tasks, ranks, size):
    """Lemmas B.3 and B.4, transcribed; sums of rank 1 to 6 of `6 x 6`."""
    weights = [gaussian(4, 6, seed=seed + 50 + t) for t in range(n_tasks)]
    true = low_rank_grams(n_tasks, 6, ranks[0], seed)
    found = [size * k for k in low_rank_grams(n_tasks, 6, ranks[1], seed + 20)]
    total, wrong = sum(true), sum(found)
    inverse, other = torch.linalg.pinv(total, hermitian=True), torch.linalg.pinv(wrong, hermitian=True)
    factor = max(inverse.norm() ** 2, other.norm() ** 2)
    assert (inverse - other).norm() <= factor * (total - wrong).norm() * (1 + 1e-9), "B.4"
    left = sum(w @ k for w, k in zip(weights, found, strict=True)) @ other
    left = left - sum(w @ c for w, c in zip(weights, true, strict=True)) @ inverse
    kappa = max(w.norm() for w in weights)
    inner = kappa * inverse.norm() + kappa * factor * sum(k.norm() for k in found)
    right = sum((c - k).norm() for c, k in zip(true, found, strict=True)) * inner
    assert left.norm() <= right * (1 + 1e-9), "B.3"
    lemma, _ = printed_lemma(weights, true, found, dtype=torch.float64)
    assert lemma.gap <= lemma.bound * (1 + 1e-9)
    if factor < 1e3 and n_tasks > 1 and size == 1.0:  # well conditioned: the same two numbers
        assert lemma.gap == pytest.approx(float(left.norm()), rel=F64_ORACLE)
        assert lemma.bound == pytest.approx(float(right), rel=F64_ORACLE)


def test_what_the_estimates_cut_off_is_taken_out_of_them():
    """`ACTMat`'s float32 cut-off: the lemma is about the matrices that the merge has used."""
    true = [torch.eye(3, dtype=torch.float64)] * 2
    found = [torch.diag(torch.tensor([1.0, 1.0, size], dtype=torch.float64)) for size in (1e-9, 1e-8)]
    weights = [gaussian(2, 3, seed=s) for s in (0, 1)]
    fine, _ = printed_lemma(weights, true, found, dtype=torch.float64)
    lemma, merged_OI = printed_lemma(weights, true, found, dtype=torch.float32)
    assert lemma.inverse < 10 < 1e15 < fine.inverse
    assert torch.equal(merged_OI[:, 2], torch.zeros(2, dtype=torch.float64))
    assert lemma.gap <= lemma.bound


def test_the_terms_are_those_of_a_plain_account():
    base = new_mlp((3, 4, 2), seed=1)
    experts, tasks = (
        [near(base, 10), near(base, 20)],
        {"a": entropy_sample(9, 3, 2, 1), "b": entropy_sample(8, 3, 2, 2)},
    )
    merged = merge_mlps(base, experts, "actmat")
    result = transfer_bound(base, experts, merged, tasks)
    with torch.no_grad():
        inputs = [[s.x, torch.relu(e.linear[0](s.x))] for e, s in zip(experts, tasks.values(), strict=True)]
        second_norm = torch.linalg.svdvals(merged.linear[1].weight)[0]
        assert result.layers[0].gamma == pytest.approx(math.sqrt(2) * float(second_norm))
        assert result.layers[1].gamma == pytest.approx(math.sqrt(2))
        for index, terms in enumerate(result.layers):
            grams = [z[index].mT @ z[index] / len(z[index]) for z in inputs]
            deltas = [e.linear[index].weight - base.linear[index].weight for e in experts]
            found = [d.mT @ d for d in deltas]
            errors = []
            for z, expert in zip(inputs, experts, strict=True):
                rows = []
                oracle = base.linear[index].weight + least_interference(deltas, grams)
                for row in z[index]:
                    change = (oracle - expert.linear[index].weight) @ row
                    rows.append(float((change + merged.linear[index].bias - expert.linear[index].bias).norm()))
                errors.append(sum(rows) / len(rows))
            assert terms.local_error == pytest.approx(sum(errors) / 2)
            a = best_scale(grams, found)
            assert terms.gap.errors == pytest.approx(
                [float((c - a * k).norm()) for c, k in zip(grams, found, strict=True)]
            )
            wanted = terms.gamma * math.sqrt(float(torch.linalg.inv(sum(grams)).trace()) / 2)
            assert terms.zeta == pytest.approx(wanted)
        losses = [
            float((s.loss_N(merged(s.x)) - s.loss_N(e(s.x))).mean())
            for e, s in zip(experts, tasks.values(), strict=True)
        ]
    assert list(result.transfer.values()) == pytest.approx(losses)
    assert result.left == pytest.approx(sum(losses) / 2)


def test_a_wrong_constant_is_found_out():
    """The check can fail: a loss whose Lipschitz constant is understated."""
    base = new_mlp((3, 2), seed=0)
    experts = [near(base, 10), near(base, 20)]
    x = gaussian(5, 3)
    samples = {
        n: Sample(x, lambda y, e=e: 100 * torch.linalg.vector_norm(y - e(x), dim=1), 0.01)
        for n, e in zip("ab", experts, strict=True)
    }
    with pytest.raises(NumericalError, match="violated") as caught:
        transfer_bound(base, experts, merge_mlps(base, experts, "average"), samples).check()
    assert any("left side <= propagated" in p for p in caught.value.problems)


def test_the_analysis_itself_of_theorem2():
    pytest.importorskip("sklearn")
    settings = {"n_tasks": 2, "width": 8, "pretraining_steps": 6, "finetuning_steps": 4}
    steps = []
    result = theorem2(**settings, on_step=lambda: steps.append(1))
    assert len(steps) == 6 + 2 * 4
    assert set(result.transfer) == {"digit", "parity"}
    assert result.left <= result.propagated <= result.right
    assert result.to_json() == theorem2(**settings).to_json()
    assert [t.row_count for t in result.tables()] == [len(result.layers), 7]
    assert len(result.figure().axes[0].patches) == 2 * len(result.layers)
    with pytest.raises(RecipeError, match="2 to 6"):
        theorem2(n_tasks=1)
