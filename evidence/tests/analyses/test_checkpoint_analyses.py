"""Analyses of checkpoints: a user's own models, and those of the paper."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.analyses import gaussian, gram
from evidence.tests.helpers.terminal import actmat as run_cli
from evidence.tests.helpers.tolerances import F32_PRODUCT, F64_IDENTITY, F64_ORACLE
from safetensors.torch import load_file
from torch import nn

from actmat.checkpoints.memory import hold_model
from actmat.errors import AlignmentError, CheckpointError, MergeError, RecipeError
from actmat.extras.collect.collect import collect
from actmat.extras.demo.model import load_encoder
from actmat.statistics import open_statistics
from actmat_experiments.analyses import (
    angles,
    correlation,
    cosine,
    distribution,
    drift,
    interference,
    scale,
    trajectory_of_statistics,
)
from actmat_experiments.analyses.correlation import entry_correlations, token_records
from actmat_experiments.analyses.demo import (
    demo_correlation,
    demo_cosine,
    demo_interference,
    demo_scale,
    input_grams,
    load_demo,
)
from actmat_experiments.analyses.distribution import QUANTILES, half_normal
from actmat_experiments.analyses.matrices import grams_of, layers_of
from actmat_experiments.analyses.monitor import DriftMonitor
from actmat_experiments.analyses.theorem1 import new_mlp
from actmat_experiments.analyses.trajectory import KeptGrams

# Scale, cosine, interference and correlation: against formulae written out, from mappings, models and statistics.


NAMES = ("math", "code")
Q0, UP0 = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def family():
    """Base, experts, merged in memory, and Gram matrices of two of the layers."""
    shapes = {Q0: (8, 8), UP0: (12, 8), "model.layers.0.mlp.down_proj.weight": (8, 12), "model.norm.weight": (8,)}
    base = {k: gaussian(*shape, seed=10 + n).float() for n, (k, shape) in enumerate(shapes.items())}
    changes = {n: {k: 0.05 * gaussian(*w.shape, seed=i).float() for k, w in base.items()} for i, n in enumerate(NAMES)}
    experts = {n: {k: base[k] + change for k, change in changes[n].items()} for n in NAMES}
    merged = {k: sum(e[k] for e in experts.values()) / 2 for k in base}
    grams = {n: {Q0: gram(20, 8, i), UP0: gram(20, 8, 9 + i)} for i, n in enumerate(NAMES)}
    return base, experts, merged, grams


def checkpoints(tensors):
    return {n: hold_model(t) for n, t in tensors.items()}


def test_interference_is_the_relative_error_of_outputs(family):
    base, experts, merged, grams = family
    result = interference(hold_model(base), checkpoints(experts), {"mean": hold_model(merged)}, grams)
    assert set(result.values) == {"base", "mean"}
    assert list(result.values["mean"]) == [Q0, UP0]  # the others have no Gram matrices
    for name in NAMES:
        w, star, c = experts[name][UP0].double(), merged[UP0].double(), grams[name][UP0]
        wanted = float(((star - w) @ c @ (star - w).mT).trace() / (w @ c @ w.mT).trace())
        assert result.values["mean"][UP0][name] == pytest.approx(wanted)
    assert result.mean("mean") == pytest.approx(
        sum(v for layer in result.values["mean"].values() for v in layer.values()) / 4
    )
    assert result.mean("mean") < result.mean("base")


def test_scale_and_cosine_written_out(family):
    base, experts, _, grams = family
    found = scale(hold_model(base), checkpoints(experts), grams)
    cosines = cosine(hold_model(base), checkpoints(experts), grams)
    kappa = {}
    for name in NAMES:
        d, c = experts[name][Q0].double() - base[Q0].double(), grams[name][Q0]
        k = d.mT @ d
        kappa[name] = float(c.norm() / k.norm())
        assert found.kappa[Q0][name] == pytest.approx(kappa[name])
        row = cosines.cosines[Q0]
        assert row["D^T D"][name] == pytest.approx(float((k * c).sum() / k.norm() / c.norm()))
        assert row["identity"][name] == pytest.approx(float(c.trace() / c.norm()) / math.sqrt(8))
    high, low = sorted(NAMES, key=lambda n: -kappa[n])
    ratio = kappa[high] / kappa[low]
    assert found.ratios(Q0) == {f"{high} / {low}": pytest.approx(ratio), f"{low} / {high}": pytest.approx(1 / ratio)}
    assert found.larger(Q0) == {f"{high} / {low}": pytest.approx(ratio)}


def test_estimates_that_are_the_gram_matrix_up_to_one_scale():
    """`D` with `D^T D = 3 C`: cosine 1, one kappa for all, and ratios of 1."""
    c = {n: gram(20, 8, i) for i, n in enumerate(NAMES)}
    base = {Q0: torch.zeros(8, 8).double()}
    experts = {n: {Q0: torch.linalg.cholesky(3 * x).mT.contiguous()} for n, x in c.items()}
    grams = {n: {Q0: x} for n, x in c.items()}
    drawn = lambda name, size: [{Q0: size * c[name]}, {Q0: c[name]}]  # noqa: E731
    found = scale(hold_model(base), checkpoints(experts), grams)
    assert list(found.kappa[Q0].values()) == pytest.approx([1 / 3] * 2)
    assert list(found.ratios(Q0).values()) == pytest.approx([1, 1])
    cosines = cosine(hold_model(base), checkpoints(experts), grams, drawn=drawn, sizes=(1, 5))
    assert cosines.mean(Q0, "D^T D") == pytest.approx(1)
    assert cosines.mean(Q0, "5 samples") == cosines.mean(Q0, "1 sample") == pytest.approx(1)
    assert cosines.mean(Q0, "identity") < 0.99
    assert cosines.n_draws == 2


def test_an_expert_that_left_a_layer_alone(family):
    base, experts, _, grams = family
    experts["code"][Q0] = base[Q0]
    found = scale(hold_model(base), checkpoints(experts), grams)
    assert found.kappa[Q0]["code"] == math.inf
    assert found.ratios(Q0) == {}
    assert found.to_json()["layers"][Q0]["kappa"]["code"] is None
    assert found.tables()[0].row_count == 2
    cosines = cosine(hold_model(base), checkpoints(experts), grams)
    assert math.isnan(cosines.mean(Q0, "D^T D"))


def test_what_is_missing_is_named(family):
    base, experts, merged, grams = family
    with pytest.raises(RecipeError) as caught:
        scale(hold_model(base), checkpoints(experts), {})
    assert len(caught.value.problems) == 2
    with pytest.raises(RecipeError, match="call the merged model something else"):
        interference(hold_model(base), checkpoints(experts), {"base": hold_model(merged)}, grams)
    with pytest.raises(RecipeError, match="statistics of these models"):
        interference(hold_model(base), checkpoints(experts), {}, {n: {} for n in NAMES})
    del experts["math"][Q0]
    experts["code"][UP0] = torch.zeros(2, 2)
    with pytest.raises(AlignmentError) as wrong:
        scale(hold_model(base), checkpoints(experts), grams)
    assert len(wrong.value.problems) == 2
    assert "q_proj" in str(wrong.value)


def test_packed_matrices_are_named_by_their_blocks(demo):
    layers = {x.name: x for x in layers_of(demo / "base", {"e": demo / "experts" / "digit"})}
    stored = load_file(demo / "base" / "model.safetensors")["layers.0.attention.in_proj_weight"]
    block = layers["layers.0.attention.in_proj_weight[v]"]
    assert torch.equal(block.base_OI, stored[32:])
    assert (block.tensor, block.rows) == ("layers.0.attention.in_proj_weight", (32, 48))
    assert len(layers) == 13


# Gram matrices


def test_input_grams_are_those_of_the_statistics_layer(demo, tmp_path):
    """Two independent ways to read along agree, and statistics files serve the analyses."""
    models = load_demo(demo)
    images = models.data["digit"].test.images_NHW[:50]
    encoder = load_encoder(models.experts["digit"])
    found = input_grams(encoder, [lambda: encoder(images[:20]), lambda: encoder(images[20:])])
    place = collect(encoder, [(images,)], checkpoint=demo / "experts" / "digit", compute_dtype="float64").save(
        tmp_path / "statistics"
    )
    with open_statistics(place) as statistics:
        for layer in layers_of(demo / "base", {}):
            own = grams_of(layer, ["digit"], {"digit": statistics})
            assert own is not None, layer.name
            assert relative_error(own["digit"], found[layer.name]) < F32_PRODUCT, layer.name
        one = interference(demo / "base", {"digit": demo / "experts" / "digit"}, {}, {"digit": statistics})
        assert one.mean("base") > 0


# On a demo


def test_a_demo_can_be_opened_again(demo):
    models = load_demo(demo)
    assert (models.seed, models.merged) == (1, ("average", "actmat"))
    assert len(models.data["digit"].test) == 200
    with pytest.raises(CheckpointError, match="actmat demo --out"):
        load_demo(demo / "base")
    with pytest.raises(RecipeError, match="Did you mean 'digit'"):
        models.task("digits")


def test_the_watched_run_ends_at_the_demos_own_expert(demo, monkeypatch):
    """The monitored training is the demo's training, bit by bit."""
    kept = []
    opened = lambda folder: kept.append(load_encoder(folder)) or kept[0]  # noqa: E731
    monkeypatch.setattr("actmat.extras.demo.model.load_encoder", opened)
    result = drift(demo, task="parity", n_moments=2)
    expert = load_encoder(demo / "experts" / "parity").state_dict()
    assert all(torch.equal(expert[n], t) for n, t in kept[0].state_dict().items())
    assert [m.step for m in result.moments] == [1, 3]
    assert result.worst_excess() < 0
    # the patches never change; the few images that fill no batch are in C only
    assert result.last.layers["patch_proj.weight"].drift < 5e-3
    assert len(result.last.layers) == 13


def test_scale_cosine_and_interference_of_a_demo(demo):
    assert len(demo_scale(demo).kappa) == 13
    cosines = demo_cosine(demo, sizes=(1, 20), n_draws=2)
    assert list(cosines.cosines["patch_proj.weight"]) == ["D^T D", "identity", "1 sample", "20 samples"]
    assert cosines.mean("patch_proj.weight", "20 samples") > cosines.mean("patch_proj.weight", "1 sample") > 0.5
    found = demo_interference(demo, methods=["actmat"], merged={"again": demo / "merged" / "actmat"})
    assert found.values["again"] == found.values["actmat"]
    assert set(found.values) == {"base", "actmat", "again"}
    with pytest.raises(RecipeError, match=r"no merge by 'actmatt'\. Did you mean 'actmat'"):
        demo_interference(demo, methods=["actmatt"])
    with pytest.raises(RecipeError, match="fewer than 5000"):
        demo_cosine(demo, sizes=(5000,))


def test_correlation_of_a_demo(demo):
    result = demo_correlation(demo, sizes=(4, 16), n_permutations=5)
    levels = result.layers["layers.1.up_proj.weight"]
    assert [(v.n_samples, v.n_tokens) for v in levels] == [(4, 68), (16, 272)]
    assert levels[1].null_tokens == pytest.approx(1 / math.sqrt(271))
    assert all(0 < v.rms < 1 and v.null_samples <= v.null_samples_95 for v in levels)
    with pytest.raises(RecipeError, match="fewer than 999"):
        demo_correlation(demo, sizes=(999,))


# Correlation


def test_token_records_keep_samples_together_also_where_attention_turns_them(demo):
    """The value map of torch's attention sees tokens first; sample by sample its inputs are the norm's outputs."""
    models = load_demo(demo)
    encoder, examples = load_encoder(models.base).double(), models.data["digit"].train
    images = examples.images_NHW[:6].double()
    record = token_records(encoder, lambda: encoder(images).square().sum(), 6)
    seen = []
    handle = encoder.layers[0].attention_norm.register_forward_hook(lambda m, i, o: seen.append(o.detach()))
    encoder(images)
    handle.remove()
    found = record["layers.0.attention.in_proj_weight[v]"].z_NI
    assert relative_error(found.view(6, 17, -1), seen[0]) < F64_ORACLE
    assert next(iter(record)) == "patch_proj.weight"
    assert encoder.patch_proj.weight.grad is None


def test_sizes_are_squared_gradients_at_outputs():
    model, x = new_mlp((4, 3), seed=0), gaussian(6, 4)
    target = gaussian(6, 3, seed=1)
    record = token_records(model, lambda: (model(x) - target).square().sum(), 6)["linear.0.weight"]
    wanted = (2 * (model(x) - target)).square().sum(1).detach()
    assert relative_error(record.size_N, wanted) < F64_ORACLE
    assert torch.equal(record.z_NI, x)


def test_correlation_sinks_with_chance_where_there_is_none_and_stays_where_there_is():
    """Gradients that are set by hand: independent of the input, or growing with it."""
    model, x = new_mlp((6, 3), seed=0), gaussian(4000, 6)
    free, bound = gaussian(4000, 3, seed=1), x[:, :3] ** 2

    def against(weights):
        return correlation(model, lambda n: (model(x[:n]) * weights[:n]).sum(), (100, 4000), n_permutations=10)

    chance, real = (against(w).layers["linear.0.weight"] for w in (free, bound))
    assert chance[1].rms < 0.3 * chance[0].rms
    assert chance[1].rms < 1.5 * chance[1].null_tokens
    assert real[1].rms > 5 * real[1].null_tokens
    assert real[1].rms > real[1].null_samples_95


def test_correlation_refuses_what_it_cannot_do():
    model, x = new_mlp((6, 3), seed=0), gaussian(5, 6)
    with pytest.raises(RecipeError, match="two samples or more"):
        correlation(model, lambda n: model(x[:n]).sum(), (1, 5))
    with pytest.raises(RecipeError, match="same number of tokens"):
        correlation(model, lambda n: model(x).sum(), (2,))
    with pytest.raises(MergeError, match="takes part"):
        correlation(model, lambda n: (gaussian(n).requires_grad_() * model.linear[0].weight.sum()).sum(), (2,))


# Trajectory and distribution: against formulae, on a demo, on statistics.


def test_distribution_is_that_of_the_entries_on_and_above_the_diagonal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3)).double()
    x, y = gaussian(60, 5), torch.randint(3, (60,))
    result = distribution(model, lambda: nn.functional.cross_entropy(model(x), y), 60, n_permutations=2)
    spread = result.layers["0.weight"]
    g = torch.softmax(model(x).detach(), 1) - nn.functional.one_hot(y, 3)
    expected = entry_correlations(x, (g / 60).square().sum(1))[torch.ones(5, 5, dtype=torch.bool).triu()].abs()
    ordered = expected.sort().values
    assert spread.measured == pytest.approx([float(ordered[round(q * 14)]) for q in QUANTILES], rel=F64_IDENTITY)
    assert spread.n_tokens == 60
    assert spread.tokens == half_normal(60)
    assert 0 <= spread.above <= 1


def test_a_planted_dependence_lies_beyond_chance():
    class Planted(nn.Module):
        """The larger an input, the larger its gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6, bias=False).double()

        def forward(self, x):
            return (self.linear(x) * x.square().sum(1, keepdim=True)).sum()

    model, x = Planted(), gaussian(400, 6)
    planted = distribution(model, lambda: model(x), 400).layers["linear.weight"]
    diagonal = entry_correlations(x, x.square().sum(1).square()).diagonal()
    assert float(diagonal.min()) > half_normal(400)[-1]
    assert planted.measured[-1] > 3 * planted.samples[-1]
    assert planted.above > 0.2
    torch.manual_seed(1)
    chance = distribution(model, lambda: (model.linear(x) * torch.randn(400, 6).double()).sum(), 400)
    assert chance.layers["linear.weight"].above < 0.25


def test_the_trajectory_of_a_demo_ends_at_zero_and_agrees_with_the_monitor(demo):
    kept, seen = KeptGrams(), {}

    def keep(step: int, monitor: DriftMonitor) -> None:
        kept.keep(step, monitor)
        seen[step] = {n: monitor.sums(n)["gram"].clone() for n in monitor.labels}

    with kept:
        done = drift(demo, n_moments=3, on_moment=keep)
        result = kept.result(done.title)
    assert list(result.steps) == sorted(seen)
    assert result.steps[0] == 0
    assert result.steps[-1] == done.last.step
    last = seen[result.steps[-1]]
    for name, row in result.angles.items():
        label = next(n for n in last if n.partition("[")[0] == name)
        expected = [angles.angle(seen[s][label], last[label]) for s in result.steps]
        assert row == pytest.approx(expected, abs=1e-3), "matrices are kept in float32, angles near 0 feel it"
        assert row[-1] == pytest.approx(0, abs=1e-3)
        assert all(0 <= a <= math.pi / 2 for a in row)
    assert max(row[0] for row in result.angles.values()) > 0.01, "training moves the inputs"
    assert len(result.median()) == len(result.steps)


def test_the_trajectory_of_saved_checkpoints(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=22, n_positions=16))
    ids = torch.randint(2, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    places = {}
    for step, shift in ((0, 0.0), (10, 0.05), (30, 0.1)):
        with torch.no_grad():
            model.transformer.wte.weight[:, 0] += shift
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        saved = GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{step}")
        collect(saved, [{"input_ids": ids}], out=tmp_path / str(step))
        places[step] = tmp_path / str(step)
    result = trajectory_of_statistics(places)
    assert result.steps == (0, 10, 30)
    name = next(n for n in result.angles if "c_attn" in n)
    start, middle, end = result.angles[name]
    assert start > middle > end == pytest.approx(0, abs=1e-6)
    with pytest.raises(RecipeError, match="two checkpoints or more"):
        trajectory_of_statistics({0: places[0]})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--statistics", "first=here"], "STEP=PATH"),
        (["--statistics", "0"], "is NAME=PATH"),
    ],
)
def test_flags_that_do_not_fit(flags, message, tmp_path):
    done = run_cli(["analyze", "trajectory", *flags, "--out", str(tmp_path)])
    assert done.code
    assert message in " ".join(done.err.split())
