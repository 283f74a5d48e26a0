"""Angles, correlations of entries, interference and its bounds against naive formulae."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.analyses import gaussian, gram
from evidence.tests.helpers.tolerances import F32_SOLVE, F64_IDENTITY, F64_ORACLE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from actmat.errors import NumericalError, RecipeError
from actmat.extras.collect.on_data import output_energy
from actmat_experiments.analyses.angles import RIGHT_ANGLE, angle, cosine, drift_angles, gram_of
from actmat_experiments.analyses.correlation import entry_correlations, null_rms, permuted_rms, rms_correlation
from actmat_experiments.analyses.demo_bounds import demo_transfer
from actmat_experiments.analyses.interference import relative_interference
from actmat_experiments.analyses.stages import outputs_of, stages_of
from actmat_experiments.analyses.theorem1 import new_mlp
from actmat_experiments.analyses.theorem2 import (
    Sample,
    best_scale,
    least_interference,
    merge_mlps,
    minimizer_gap,
    transfer_bound,
)
from actmat_experiments.analyses.transfer import TransferResult, _norms, transfer

# Theorem 3.3 on transformers and on perceptrons: every inequality, and each term against a formula.


NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def transferred(demo):
    return demo_transfer(demo)


def states(models):
    return [dict(m.state_dict()) for m in models]


def mlps(activation="relu"):
    """A base, three experts near it, their merge, and data of three tasks, all float64."""
    base = new_mlp((6, 8, 8, 5), activation=activation, seed=1)
    experts = []
    for i in range(3):
        expert = new_mlp((6, 8, 8, 5), activation=activation, seed=1)
        with torch.no_grad():
            for j, parameter in enumerate(expert.parameters()):
                parameter += 0.3 * gaussian(*parameter.shape, seed=10 * i + j)
        experts.append(expert)
    x = {n: gaussian(40, 6, seed=50 + i) for i, n in enumerate(NAMES)}
    y = {n: torch.randint(5, (40,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(NAMES)}
    return base, experts, merge_mlps(base, experts, "actmat"), x, y


def losses_of(x, y):
    return {n: lambda model, n=n: nn.functional.cross_entropy(model(x[n]), y[n], reduction="none") for n in NAMES}


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_on_a_perceptron_it_lies_between_the_truth_and_the_products_of_norms(activation):
    base, experts, merged, x, y = mlps(activation)
    first, *others = states([base, *experts, merged])
    *own, end = others
    result = transfer(base, first, dict(zip(NAMES, own, strict=True)), end, losses_of(x, y))
    base.load_state_dict(first)
    samples = {
        n: Sample(x[n], lambda out, n=n: nn.functional.cross_entropy(out, y[n], reduction="none"), math.sqrt(2))
        for n in NAMES
    }
    known = transfer_bound(base, experts, merged, samples)
    known.check()
    for n, task in result.tasks.items():
        assert task.signed == pytest.approx(known.transfer[n], rel=1e-9, abs=1e-12)
        assert task.absolute == pytest.approx(known.absolute[n], rel=1e-9)
        assert abs(task.signed) <= task.absolute <= task.propagated <= task.bound
        for terms, layer_terms in zip(task.stages.values(), known.layers, strict=True):
            assert terms.gamma <= layer_terms.gamma * (1 + 1e-9), "the product of norms is a Lipschitz constant"
    mean = sum(t.propagated for t in result.tasks.values()) / 3
    assert mean <= known.propagated * (1 + 1e-9)
    for i, layer_terms in enumerate(known.layers):
        stages = [list(t.stages.values())[i] for t in result.tasks.values()]
        assert sum(s.optimum for s in stages) / 3 == pytest.approx(layer_terms.local_error, rel=1e-8)
        assert sum(s.local for s in stages) / 3 == pytest.approx(layer_terms.merged_error, rel=1e-8)


def test_the_merge_of_one_expert_transfers_nothing():
    base, experts, _, x, y = mlps()
    first, own = states([base, experts[0]])
    task = transfer(base, first, {"a": own}, own, {"a": losses_of(x, y)["a"]}).tasks["a"]
    assert task.absolute == task.propagated == 0.0


def test_both_inequalities_on_a_transformer(demo, transferred):
    result = transferred
    for task in result.tasks.values():
        assert abs(task.signed) <= task.absolute
        assert task.absolute <= task.propagated * (1 + F32_SOLVE) + 1e-6
        assert task.propagated <= task.bound * (1 + F32_SOLVE)
        moved = [s for s in task.stages.values() if not math.isnan(s.gamma) and s.local > 0]
        assert any(s.zeta > 0 for s in moved)
        assert any(s.zeta == 0 for s in moved), "norms are stages, too"
    assert len(result.tables()) == 2
    with pytest.raises(RecipeError, match="no merge by"):
        demo_transfer(demo, method="tsv")


def test_stages_cover_every_parameter_once_in_the_order_of_execution():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True, dropout=0.0)
    x = torch.randn(3, 4, 8)
    stages = stages_of(encoder, lambda: encoder(x))
    names = [s.name for s in stages]
    assert names == ["norm1", "self_attn.in_proj_weight", "self_attn.out_proj.weight", "norm2", "linear1.weight",
                     "linear2.weight"]  # fmt: skip
    assert sorted(n for s in stages for n in s.parameters) == sorted(n for n, _ in encoder.named_parameters())
    for stage in stages:
        with outputs_of(stage) as outputs, torch.no_grad():
            encoder(x)
        assert len(outputs) == 1, stage.name


def test_a_change_that_samples_share_counts_for_each():
    shared, own = gaussian(1, 4, 3), gaussian(6, 4, 3)
    assert torch.allclose(_norms(shared, 6), shared.norm().expand(6))
    assert torch.allclose(_norms(own, 6), own.flatten(1).norm(dim=1))


def test_a_stage_whose_output_is_no_tensor_has_none():
    class Pair(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x), None

    model, x = Pair(3), gaussian(2, 3).float()
    (stage,) = stages_of(model, lambda: model(x))
    with outputs_of(stage) as outputs:
        model(x)
    assert outputs == []


def test_the_inputs_of_a_replaced_layer_are_the_experts(demo, transferred):
    """The local error of a linear map is its change of weights times the expert's inputs."""
    from actmat.extras.demo.model import load_encoder
    from actmat_experiments.analyses.demo import load_demo

    models = load_demo(demo)
    name = "layers.0.up_proj"
    task = next(iter(models.data))
    expert, x = load_encoder(models.experts[task]), models.data[task].test.images_NHW
    seen = []
    dict(expert.named_modules())[name].register_forward_hook(lambda m, given, y: seen.append(given[0].detach()))
    with torch.no_grad():
        expert(x)
    merged = dict(load_encoder(models.merge("actmat")).named_parameters())
    own = dict(expert.named_parameters())
    shift = {p: (merged[f"{name}.{p}"] - own[f"{name}.{p}"]).detach() for p in ("weight", "bias")}
    change = seen[0] @ shift["weight"].mT + shift["bias"]
    expected = float(change.flatten(1).norm(dim=1).mean())
    found = transferred.tasks[task].stages[f"{name}.weight"]
    assert found.local == pytest.approx(expected, rel=F32_SOLVE)
    assert relative_error(torch.tensor(found.input), seen[0].double().flatten(1).norm(dim=1).mean()) < F32_SOLVE


def test_a_violated_inequality_is_an_error(transferred):
    name, task = next(iter(transferred.tasks.items()))
    with pytest.raises(NumericalError, match=r"Theorem 3\.3 is violated"):
        TransferResult("x", {name: dataclasses.replace(task, absolute=2 * task.propagated + 1)}).check()


def test_experts_and_losses_have_the_same_names():
    base, experts, merged, x, y = mlps()
    with pytest.raises(RecipeError, match="own loss"):
        transfer(base, *states([base]), {"a": states(experts)[0]}, states([merged])[0], losses_of(x, y))


# Angles between matrices: known values, all digits near zero, the triangle inequality, PSD within a right angle.


def test_known_angles():
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    b = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    assert angle(a, a) == 0
    assert angle(a, b) == pytest.approx(math.pi / 2)
    assert angle(a, -3 * a) == pytest.approx(math.pi)
    assert angle(a, a + b / 2) == pytest.approx(math.pi / 4)
    assert cosine(a, a + b / 2) == pytest.approx(math.sqrt(0.5))


def test_small_angles_keep_their_digits():
    """arccos would give 0 or 1.5e-8 for all of these."""
    a, b = torch.eye(2).double(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    for tilt in (1e-6, 1e-9, 1e-12):
        assert angle(a, a + tilt * b) == pytest.approx(tilt, rel=1e-3)


def test_scale_does_not_matter_even_where_squares_underflow():
    a, b = gaussian(4, 3), gaussian(4, 3, seed=1)
    assert angle(1e-200 * a, 1e150 * b) == pytest.approx(angle(a, b), rel=F64_IDENTITY)
    assert math.cos(angle(a, b)) == pytest.approx(cosine(a, b), rel=1e-10)


def test_zero_has_no_direction_and_shapes_must_agree():
    assert math.isnan(angle(torch.zeros(2, 2), torch.eye(2)))
    assert math.isnan(cosine(torch.eye(2), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(3, 3\)"):
        angle(torch.eye(2), torch.eye(3))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 6), ranks=st.tuples(*[st.integers(1, 6)] * 3))
def test_positive_matrices_lie_within_a_right_angle_and_obey_the_triangle(seed, width, ranks):
    a, b, c = (gram_of(gaussian(r, width, seed=seed % 1000 + i)) for i, r in enumerate(ranks))
    for x, y in ((a, b), (b, c), (a, c)):
        assert 0 <= angle(x, y) <= RIGHT_ANGLE + F64_IDENTITY
    assert angle(a, c) <= angle(a, b) + angle(b, c) + F64_IDENTITY


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n_out=st.integers(1, 5), n_in=st.integers(1, 5))
def test_both_bounds_hold_for_any_matrices(seed, n_out, n_in):
    """The triangle inequality needs nothing of S and S~; with `D` along `G` the optimizer's angle is zero."""
    gradient, second, decoupled, gram = (
        gaussian(n_out, n_in, seed=seed),
        *(gram_of(gaussian(4, n_in, seed=seed + i)) for i in (1, 2, 3)),
    )
    along = drift_angles(-0.01 * gradient, gradient, second, decoupled, gram)
    assert along.optimizer < F64_IDENTITY
    assert along.estimate <= along.bound + F64_IDENTITY
    other = drift_angles(gaussian(n_out, n_in, seed=seed + 4), gradient, second, decoupled, gram)
    assert other.estimate <= other.full_bound + F64_IDENTITY
    assert other.full_bound == pytest.approx(other.optimizer + other.cross + other.correlation + other.drift)


def test_without_the_optimizers_angle_the_bound_can_fail():
    """So the tests above can fail too: a delta that is not along the gradient breaks Theorem 3.1's own bound."""
    e = torch.eye(2).double()
    gradient, delta = e[:1], e[1:]
    gram = gram_of(gradient)
    found = drift_angles(delta, gradient, gram, gram, gram)
    assert found.bound < F64_IDENTITY
    assert found.estimate == pytest.approx(RIGHT_ANGLE)
    assert found.full_bound == pytest.approx(RIGHT_ANGLE)
    assert found.identity == pytest.approx(math.pi / 4)


# Correlations of products of inputs with the size of gradients: against loops, and against chance.


def test_equal_to_a_loop_over_pairs():
    z, size = gaussian(30, 4), gaussian(30, seed=1).square()
    found = entry_correlations(z, size)
    for i, j in itertools.product(range(4), repeat=2):
        products = [float(row[i] * row[j]) for row in z]
        assert float(found[i, j]) == pytest.approx(statistics.correlation(products, size.tolist()), abs=1e-12)


def test_perfect_and_undefined_correlations():
    z = torch.stack([gaussian(20), torch.ones(20).double()], dim=1)
    found = entry_correlations(z, z[:, 0].square())
    assert float(found[0, 0]) == pytest.approx(1)
    assert math.isnan(float(found[1, 1]))  # constant over tokens
    assert not math.isnan(float(found[0, 1]))
    assert entry_correlations(z, torch.ones(20)).isnan().all()
    assert math.isnan(rms_correlation(entry_correlations(z, torch.ones(20))))


def test_the_mean_square_counts_every_pair_once():
    found = torch.tensor([[0.6, 0.0], [0.0, math.nan]])
    assert rms_correlation(found) == pytest.approx(math.sqrt((0.36 + 0) / 2))


@pytest.mark.parametrize("heavy", [False, True])
def test_chance_is_exact_over_all_orders(heavy):
    """Also for numbers as uneven as gradients' sizes are: the mean over all 6! orders is 1 / (N - 1)."""
    z, size = gaussian(6, 2), gaussian(6, seed=1).square()
    size = size**4 if heavy else size
    squares = [float(entry_correlations(z, size[list(order)])[0, 1]) ** 2 for order in itertools.permutations(range(6))]
    assert statistics.fmean(squares) == pytest.approx(null_rms(6) ** 2, rel=1e-10)


def test_permutations_of_samples_see_that_tokens_of_a_sample_are_alike():
    """50 samples of 20 equal tokens are 50 observations, not 1000."""
    z = gaussian(50, 6).repeat_interleave(20, 0)
    size = gaussian(50, seed=1).square().repeat_interleave(20)
    generator = torch.Generator().manual_seed(2)
    places = torch.arange(1000).view(50, 20)
    whole = permuted_rms(z, size, [places[torch.randperm(50, generator=generator)].flatten() for _ in range(30)])
    single = permuted_rms(z, size, [torch.randperm(1000, generator=generator) for _ in range(30)])
    assert statistics.fmean(whole) == pytest.approx(null_rms(50), rel=0.25)
    assert statistics.fmean(single) == pytest.approx(null_rms(1000), rel=0.25)


def test_too_few_tokens():
    with pytest.raises(ValueError, match="two or more"):
        entry_correlations(gaussian(1, 3), gaussian(1))
    with pytest.raises(ValueError, match="got 4 and 5"):
        entry_correlations(gaussian(4, 3), gaussian(5))


# Output errors from Gram matrices, and the lemma on minimizers: identity, inequality, and where it is attained.


def test_energy_is_the_mean_square_over_samples():
    z, a, b = gaussian(50, 4), gaussian(3, 4, seed=1), gaussian(3, 4, seed=2)
    c = z.mT @ z / 50
    assert output_energy(a, c) == pytest.approx(float((z @ a.mT).square().sum(1).mean()))
    wanted = float((z @ (a - b).mT).square().sum() / (z @ b.mT).square().sum())
    assert relative_interference(a, b, c) == pytest.approx(wanted)
    assert relative_interference(a, b, 7 * c) == pytest.approx(wanted)
    assert relative_interference(b, b, c) == 0
    assert math.isnan(relative_interference(a, torch.zeros(3, 4), c))


def test_the_least_interference_is_least():
    deltas, grams = [gaussian(3, 4, seed=i) for i in range(3)], [gram(9, 4, 10 + i) for i in range(3)]

    def interference(d):
        return sum(output_energy(d - x, c) for x, c in zip(deltas, grams, strict=True))

    best = least_interference(deltas, grams)
    for i in range(20):
        assert interference(best) <= interference(best + 1e-3 * gaussian(3, 4, seed=20 + i))
    wanted = sum(d @ c for d, c in zip(deltas, grams, strict=True)) @ torch.linalg.inv(sum(grams))
    assert relative_error(best, wanted) < F64_ORACLE


def test_best_scale_is_best():
    grams, found = [gram(9, 4, i) for i in range(3)], [gram(3, 4, 5 + i) for i in range(3)]
    factor = best_scale(grams, found)

    def error(a):
        return sum(float((c - a * k).square().sum()) for c, k in zip(grams, found, strict=True))

    assert error(factor) < min(error(1.01 * factor), error(0.99 * factor))
    assert best_scale(grams, [torch.zeros(4, 4)] * 3) == 0


def test_the_identity_behind_the_lemma():
    """`(D^ - D) S = sum_t (D^ - D_t)(C_t - C^_t)` for the minimizer under the estimates."""
    deltas, grams = [gaussian(3, 4, seed=i) for i in range(3)], [gram(9, 4, 10 + i) for i in range(3)]
    found = [gram(9, 4, 30 + i) for i in range(3)]
    merged = least_interference(deltas, found)
    left = (merged - least_interference(deltas, grams)) @ sum(grams)
    right = sum((merged - d) @ (c - k) for d, c, k in zip(deltas, grams, found, strict=True))
    assert relative_error(left, right) < F64_ORACLE
    gap = minimizer_gap(merged, deltas, grams, found)
    assert gap.residual < F64_IDENTITY
    values = torch.linalg.eigvalsh(sum(grams))
    assert gap.smallest == pytest.approx(float(values[0]))
    assert gap.trace_inverse == pytest.approx(float((1 / values).sum()))


def test_the_bound_is_attained_in_one_dimension():
    """Two scalar experts 0 and 1 with Gram 1 each; the second is estimated 3 times too large."""
    deltas = [torch.zeros(1, 1).double(), torch.ones(1, 1).double()]
    one = torch.ones(1, 1).double()
    merged = least_interference(deltas, [one, 3 * one])
    gap = minimizer_gap(merged, deltas, [one, one], [one, 3 * one])
    assert float(merged) == pytest.approx(0.75)
    assert gap.gap == pytest.approx(0.25)
    assert gap.bound == pytest.approx(0.25)
