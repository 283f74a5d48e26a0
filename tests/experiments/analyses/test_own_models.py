"""Trajectory and distribution: against formulae, on a demo, on statistics."""

from __future__ import annotations

import math

import pytest
import torch
from tests.helpers.analyses import gaussian
from tests.helpers.merging import actmat as run_cli
from tests.tolerances import F64_IDENTITY
from torch import nn

from actmat.errors import RecipeError
from actmat.extras.collect.collect import collect
from actmat_experiments.analyses import angles, distribution, drift, trajectory_of_statistics
from actmat_experiments.analyses.correlation import entry_correlations
from actmat_experiments.analyses.distribution import QUANTILES, half_normal
from actmat_experiments.analyses.monitor import DriftMonitor
from actmat_experiments.analyses.trajectory import KeptGrams


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
