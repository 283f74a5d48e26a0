"""Theorem 3.1 as an inequality over many random problems, with one token per sample and with several."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.analyses import gaussian
from tests.helpers.tokens import naive_sums
from tests.tolerances import F64_IDENTITY, F64_ORACLE, relative_error
from torch import nn

from actmat.errors import NumericalError
from actmat_experiments.analyses.angles import RIGHT_ANGLE, angle, gram_of
from actmat_experiments.analyses.drift import ROUNDING, moments_until
from actmat_experiments.analyses.theorem1 import descend_watched, new_mlp, theorem1


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


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), n_samples=st.integers(1, 5), n_tokens=st.integers(1, 6))
def test_the_inequality_holds_where_a_sample_has_several_tokens(seed, n_samples, n_tokens):
    """A layer applied to every token, then mixed over tokens: gradients of one sample's tokens depend on each other."""
    torch.manual_seed(seed)
    first, second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    model = nn.ModuleDict({"first": first, "second": second})
    x, y = gaussian(n_samples, n_tokens, 3, seed=seed), gaussian(n_samples, 2, seed=seed + 1)

    def loss():
        mixed = torch.tanh(first(x)).cumsum(1)
        return (second(mixed).mean(1) - y).square().sum(1).mean()

    monitor, moments = descend_watched(model, loss, n_steps=4, rate=0.05)
    assert monitor.labels == ["first.weight", "second.weight"]
    for found in moments[-1].layers.values():
        assert found.estimate <= found.bound + ROUNDING
        assert found.optimizer < 1e-6


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
