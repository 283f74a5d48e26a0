"""Theorem 3.3 on transformers and on perceptrons: every inequality, and each term against a formula."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.helpers.analyses import gaussian
from tests.tolerances import F32_SOLVE, relative_error
from torch import nn

from actmat.errors import NumericalError, RecipeError
from actmat_experiments.analyses.demo_bounds import demo_transfer
from actmat_experiments.analyses.stages import outputs_of, stages_of
from actmat_experiments.analyses.theorem1 import new_mlp
from actmat_experiments.analyses.theorem2 import Sample, merge_mlps, transfer_bound
from actmat_experiments.analyses.transfer import TransferResult, _norms, transfer

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
