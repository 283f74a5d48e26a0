"""A search merges adapters in memory where the method has a low-rank form, and finds the same deltas."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.helpers.docs_fixture import write_models
from tests.tolerances import F32_PRODUCT
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from actmat.checkpoints.resolve import open_checkpoint
from actmat.cli import searching
from actmat.cli.searching import showing_search
from actmat.extras.tune.live import Directions, Loader
from actmat.extras.tune.merges import Merges, search_inputs
from actmat.extras.tune.space import MergeChoice
from actmat.extras.tune.tuning import open_live
from actmat.recipe import Recipe, make_recipe
from actmat.settings import RunSettings

MIXTRAL = MixtralConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, num_local_experts=2,
)  # fmt: skip
STACK = "experts.down_proj"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    place = tmp_path_factory.mktemp("models")
    write_models(place)
    return make_recipe(
        {"base": str(place / "base"), "experts": [str(place / "adapters" / n) for n in ("math", "code")]}
    )


def factored(recipe: Recipe, folder: Path) -> Merges:
    """Merges that are adapters where the inputs of the recipe allow it."""
    with search_inputs(recipe) as inputs:
        return Merges(recipe, folder, RunSettings(), factor_bytes=inputs.factor_bytes)


def weights(merges: Merges, choice: MergeChoice, scale: float = 1.0) -> dict[str, Tensor]:
    """The weights of the live model as the choice."""
    assert merges.make([choice]) == [choice], merges.refused
    loader = Loader(merges.recipe.base)
    with open_checkpoint(loader.base) as base:
        live, _ = open_live(merges.whole_plan(choice), "none", loader, base)
        live.write(Directions(live, base, merges, loader, 1 << 30).of(choice), lambda group: scale)
    return {name: tensor.double() for name, tensor in live.model.state_dict().items()}


@pytest.mark.parametrize(
    ("method", "space"), [("average", None), ("tsv", None), ("dc_merge", None), ("actmat", None), ("dc_merge", "pico")]
)
def test_the_deltas_are_those_of_whole_merges(recipe: Recipe, method: str, space: Any, tmp_path: Path) -> None:
    choice, base = MergeChoice(method, space=space), Loader(recipe.base).load(recipe.base).model.state_dict()
    short = factored(recipe, tmp_path / "short")
    whole = Merges(recipe, tmp_path / "whole", RunSettings())
    assert (short.is_factored(choice), whole.is_factored(choice)) == (True, False)
    found, wanted = weights(short, choice), weights(whole, choice)
    assert found.keys() == wanted.keys()
    changed = [n for n in wanted if not torch.equal(wanted[n], base[n].double())]
    assert len(changed) == 4
    for name in changed:
        delta = wanted[name] - base[name].double()
        assert (found[name] - wanted[name]).norm() < F32_PRODUCT * (delta.norm() + base[name].double().norm()), name
    assert not list(tmp_path.glob("short/*")), "no candidate is written"


def test_adapters_of_stacked_experts_reach_their_parameters(tmp_path: Path) -> None:
    """Experts that are separate on disk and one parameter in memory, against the model that PEFT merges."""
    base = MixtralForCausalLM(MIXTRAL).eval()
    base.save_pretrained(tmp_path / "base")
    places = []
    for seed in range(2):
        config = LoraConfig(r=2, target_modules=["q_proj"], lora_bias=False, target_parameters=[STACK])
        tuned = get_peft_model(MixtralForCausalLM.from_pretrained(tmp_path / "base"), config)
        rng = torch.Generator().manual_seed(seed)
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=rng))
        tuned.save_pretrained(str(tmp_path / f"adapter-{seed}"))
        places.append(tmp_path / f"adapter-{seed}")
    recipe = make_recipe({"base": str(tmp_path / "base"), "experts": [str(p) for p in places]})
    choice = MergeChoice("average")
    found = weights(factored(recipe, tmp_path / "short"), choice)
    wanted = weights(Merges(recipe, tmp_path / "whole", RunSettings()), choice)
    changed = [n for n in wanted if not torch.equal(wanted[n], base.state_dict()[n].double())]
    assert any(n.endswith(STACK) for n in changed)
    for name in changed:
        assert (found[name] - wanted[name]).norm() < F32_PRODUCT * wanted[name].norm(), name


def test_weights_that_a_candidate_does_not_change_are_the_base_s_again(recipe: Recipe, tmp_path: Path) -> None:
    """Only what changed is written: a candidate after another is as one alone."""
    merges, loader = factored(recipe, tmp_path / "m"), Loader(recipe.base)
    choice = MergeChoice("average")
    merges.make([choice])
    base = open_checkpoint(loader.base)
    live, _ = open_live(merges.whole_plan(choice), "none", loader, base)
    before = {name: tensor.clone() for name, tensor in live.model.state_dict().items()}
    live.write(Directions(live, base, merges, loader, 1 << 30).of(choice), lambda group: 2.0)
    assert not all(torch.equal(before[n], t) for n, t in live.model.state_dict().items())
    live.restore()
    assert all(torch.equal(before[n], t) for n, t in live.model.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"keep": ["*.v_proj.weight"]}, "average"),
        ({"scope": "all"}, "average"),
        ({"post": ["isotropize"]}, "average"),
        ({}, "ties"),
    ],
)
def test_ways_of_its_own_and_methods_of_entries_are_merged_whole(
    recipe: Recipe, fields: dict[str, object], method: str, tmp_path: Path
) -> None:
    own = make_recipe({**recipe.model_dump(exclude_defaults=True), **fields})
    assert not factored(own, tmp_path).is_factored(MergeChoice(method))


def test_progress_is_told_where_no_bar_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage at once, and the last state again and again while nothing happens."""
    monkeypatch.setattr(searching, "BETWEEN_LINES", 0.01)
    with showing_search(quiet=False) as progress:
        progress.doing("asking math")
        deadline = time.monotonic() + 60
        told = ""
        while told.count("s: asking math\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert told.startswith("0 s: asking math")
    assert told.count("s: asking math\n") >= 3
    with showing_search(quiet=True) as progress:
        progress.doing("asking math")
    assert capsys.readouterr().err == ""
