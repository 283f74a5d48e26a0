"""`actmat diagnose MERGED --statistics`: held against the activations themselves, layer by layer."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.family import TEXTS, experts_of
from tests.helpers.merging import actmat as run
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import actmat
from actmat.diagnostics.model import read_diagnosis
from actmat.errors import RecipeError, StatisticsError


@pytest.fixture(scope="module")
def stats(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats")
    for name in TEXTS:
        collect(place, str(place / "experts" / name), name, folder / name)
    return folder


def collect(place: Path, model: str, name: str, out: Path, *flags: str) -> None:
    data = str(place / f"{name}.jsonl")
    run(["statistics", "collect", model, "--data", data, "--out", out, "-q", *flags], code=0)


def naive(folder: Path, merged: Path, name: str) -> float:
    """Run the expert, one text at a time, and put every layer's inputs through the differences of weights."""
    place = folder / "experts" / name
    tokenizer: Any = AutoTokenizer.from_pretrained(place)
    model, base, result = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (place, folder / "base", merged)
    )
    apart = own = 0.0
    for layer, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        seen: list[torch.Tensor] = []
        hook = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].double()))
        with torch.no_grad():
            for text in TEXTS[name]:
                model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]))
        hook.remove()
        z = torch.cat([s.flatten(0, -2) for s in seen])
        w, w0, w1 = (m.get_submodule(layer).weight.detach().double() for m in (model, base, result))
        apart += float((z @ (w1 - w).T).square().sum())
        own += float((z @ (w - w0).T).square().sum())
    return math.sqrt(apart / own)


def test_rows_are_what_the_activations_say(place: Path, stats: Path, tmp_path: Path) -> None:
    flags = [x for n in TEXTS for x in ("--statistics", f"{n}={stats / n}")]
    done = run(["diagnose", place / "merged", *flags, "--out", tmp_path / "r.json"], code=0)
    rows = read_diagnosis(tmp_path / "r.json").residual_on_data
    assert [(r.expert, r.matrices) for r in rows] == [(n, 15) for n in TEXTS]
    for row in rows:
        assert row.residual == pytest.approx(naive(place, place / "merged", row.expert), rel=1e-4)
        assert re.search(rf"^{row.expert} +\d+% +\d\.\d\d +{row.residual:.2f} *$", done.out, re.MULTILINE)
        assert 0.1 < row.residual < 1.5, "neither the expert nor anything far off"


def test_the_expert_itself_is_0_and_the_base_1(place: Path, stats: Path, tmp_path: Path) -> None:
    (row,) = actmat.residual_on_data(place / "alone", [stats / "math"])
    assert row.residual == pytest.approx(0.0, abs=1e-3)
    actmat.merge(place / "base", experts_of(place)[:1], method="average", scale=0.0, out=tmp_path / "base")
    (row,) = actmat.residual_on_data(tmp_path / "base", {"math": stats / "math"})
    assert row.residual == pytest.approx(1.0, abs=1e-6)
    (row,) = actmat.residual_on_data(place / "merged", {"code": stats / "code"})
    assert row.expert == "code", "only experts with statistics have rows"


def test_adapters_into_a_model(place: Path, tmp_path: Path) -> None:
    """Statistics of an adapter on its base; a merge of one adapter is that adapter up to rounding."""
    adapter = place / "adapters" / "math"
    collect(place, str(adapter), "math", tmp_path / "stats", "--base", str(place / "base"))
    actmat.merge(place / "base", [adapter], method="average", out=tmp_path / "model", dtype="float32")
    (row,) = actmat.residual_on_data(tmp_path / "model", [tmp_path / "stats"])
    assert row.matrices == 4
    assert row.residual == pytest.approx(0.0, abs=1e-4)
    actmat.merge(None, [adapter, place / "adapters" / "code"], method="average", out=tmp_path / "adapter")
    with pytest.raises(StatisticsError, match=r"is an adapter.*--to"):
        actmat.residual_on_data(tmp_path / "adapter", {"math": tmp_path / "stats"})


def test_what_does_not_fit_is_refused(place: Path, stats: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Did you mean 'math'"):
        actmat.residual_on_data(place / "merged", {"maths": stats / "math"})
    with pytest.raises(StatisticsError, match="do not belong to the merged models"):
        actmat.residual_on_data(place / "merged", {"math": stats / "code"})
    collect(place, str(place / "experts" / "math"), "math", tmp_path / "fisher", "--no-gram", "--fisher")
    with pytest.raises(StatisticsError, match="no Gram matrix of a merged matrix") as caught:
        actmat.residual_on_data(place / "merged", {"math": tmp_path / "fisher"})
    assert caught.value.problems == ("expert 'math'",)
