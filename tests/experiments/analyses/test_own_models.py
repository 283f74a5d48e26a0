"""Trajectory and distribution: against formulae, on a demo, on a transformers model with texts, on statistics."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.helpers.analyses import gaussian
from tests.helpers.merging import actmat as run_cli
from tests.tolerances import F32_PRODUCT, F64_IDENTITY
from torch import nn

from actmat.errors import CheckpointError, RecipeError, StatisticsError
from actmat.extras.collect.collect import collect
from actmat_experiments.analyses import angles, distribution, drift, trajectory_of_statistics
from actmat_experiments.analyses.correlation import entry_correlations
from actmat_experiments.analyses.distribution import QUANTILES, half_normal
from actmat_experiments.analyses.monitor import DriftMonitor
from actmat_experiments.analyses.subjects import Finetuning, Subject, finetune, open_subject
from actmat_experiments.analyses.trajectory import KeptGrams
from actmat_experiments.core import DataOptions

WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT-2 with a tokenizer of words, texts of one length and texts of several."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("own-model")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=22, n_positions=16))
    model.save_pretrained(place / "base")
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<eos>", "<unk>", *WORDS])}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        place / "base"
    )
    for name, lengths in (("even", [10] * 12), ("ragged", range(4, 16))):
        rows = [{"text": " ".join(WORDS[(3 * i + j * j) % 20] for j in range(n))} for i, n in enumerate(lengths)]
        (place / f"{name}.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    return place


def opened(folder, name="even"):
    return open_subject(str(folder / "base"), DataOptions(str(folder / f"{name}.jsonl"), batch_size=4, max_length=16))


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


def test_a_run_of_a_transformers_model_obeys_the_theorem(folder):
    subject = opened(folder, "ragged")
    with KeptGrams() as kept:
        result = finetune(subject, Finetuning(steps=4, rate=1e-3, n_moments=3), on_moment=kept.keep)
        path = kept.result(result.title)
    assert result.worst_excess() < F32_PRODUCT
    assert "transformer.h.0.attn.c_attn.weight[q]" in result.last.layers
    assert [m.step for m in result.moments] == [1, 2, 4]
    assert result.moments[-1].loss < result.moments[0].loss
    assert path.steps == (0, 1, 2, 4)
    assert "transformer.h.0.attn.c_attn.weight" in path.angles
    assert path.angles["transformer.h.0.attn.c_attn.weight"][0] > 0, "embeddings are trained too"
    with pytest.raises(RecipeError, match="above zero"):
        finetune(subject, Finetuning(steps=0))


def test_padding_counts_nowhere_in_a_run(folder):
    """The same texts alone and in padded batches: the same Gram matrices at step 0."""
    found = []
    for size in (1, 12):
        data = DataOptions(str(folder / "ragged.jsonl"), batch_size=size, max_length=16)
        subject = open_subject(str(folder / "base"), data)
        seen = {}

        def keep(step, monitor, seen=seen):
            seen.setdefault(step, {n: monitor.sums(n)["gram"].clone() for n in monitor.labels})

        finetune(subject, Finetuning(steps=1, n_moments=1), on_moment=keep)
        found.append(seen[0])
    for name, gram in found[0].items():
        assert float((gram - found[1][name]).norm() / gram.norm()) < F32_PRODUCT, name


def test_correlations_refuse_padding_and_too_few_samples(folder):
    assert opened(folder).whole(6).requires_grad
    with pytest.raises(RecipeError, match="different lengths"):
        opened(folder, "ragged").whole(6)
    with pytest.raises(RecipeError, match="12 samples, fewer than 13"):
        opened(folder).whole(13)


def test_a_model_without_a_loss_is_refused():
    subject = Subject("here", nn.Linear(2, 2), [{"input": torch.ones(3, 2)}])
    with pytest.raises(RecipeError, match="gives no loss"):
        subject.loss(subject.batches[0])


def test_the_trajectory_of_saved_checkpoints(folder, tmp_path):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder / "base")
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


@pytest.mark.slow
def test_the_commands_take_models(folder, tmp_path):
    own = ["--model", str(folder / "base"), "--data", str(folder / "even.jsonl"), "--max-length", "16"]
    own += ["--layer", "*c_attn*", "--out", str(tmp_path)]
    run = ["--steps", "2", "--rate", "1e-3", "--moments", "2"]
    more = {
        "trajectory": run,
        "drift": run,
        "distribution": ["--samples", "8", "--permutations", "1"],
        "correlation": ["--samples", "4,8", "--permutations", "2"],
    }
    for name, flags in more.items():
        done = run_cli(["analyze", name, *own, *flags])
        assert done.code == 0, done.err
        stored = json.loads((tmp_path / f"{name}.json").read_text())
        assert stored["analysis"] == name
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert json.loads((tmp_path / "trajectory.json").read_text())["steps"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "x"], "needs --model and --data"),
        (["--statistics", "first=here"], "STEP=PATH"),
        (["--statistics", "0"], "is NAME=PATH"),
    ],
)
def test_flags_that_do_not_fit(flags, message, tmp_path):
    done = run_cli(["analyze", "trajectory", *flags, "--out", str(tmp_path)])
    assert done.code
    assert message in " ".join(done.err.split())


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises((StatisticsError, CheckpointError), match="x-model"):
        open_subject(str(tmp_path / "x-model"), DataOptions(str(tmp_path / "x.jsonl")))
