"""A search merges adapters into adapters where the method has a low-rank form, and finds the same deltas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.docs_fixture import write_models
from tests.tolerances import F32_PRODUCT
from torch import Tensor

from actmat.extras.tune.commands.searching import showing_search
from actmat.extras.tune.live import Loader
from actmat.extras.tune.merges import Merges
from actmat.extras.tune.space import MergeChoice
from actmat.recipe import Recipe, make_recipe
from actmat.settings import RunSettings


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    place = tmp_path_factory.mktemp("models")
    write_models(place)
    return make_recipe(
        {"base": str(place / "base"), "experts": [str(place / "adapters" / n) for n in ("math", "code")]}
    )


def weights(merges: Merges, choice: MergeChoice) -> dict[str, Tensor]:
    assert merges.make([choice]) == [choice], merges.refused
    model = Loader(merges.recipe.base).merged(str(merges.folder_of(choice)))
    return {name: tensor.double() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("method", ["average", "tsv", "dc_merge", "actmat"])
def test_the_deltas_are_those_of_whole_merges(recipe: Recipe, method: str, tmp_path: Path) -> None:
    choice, base = MergeChoice(method), Loader(recipe.base).load(recipe.base).model.state_dict()
    short = Merges(recipe, tmp_path / "short", RunSettings())
    whole = Merges(recipe, tmp_path / "whole", RunSettings(), keeps_factors=False)
    assert (short.is_factored(choice), whole.is_factored(choice)) == (True, False)
    found, wanted = weights(short, choice), weights(whole, choice)
    assert found.keys() == wanted.keys()
    changed = [n for n in wanted if not torch.equal(wanted[n], base[n].double())]
    assert len(changed) == 4
    for name in changed:
        delta = wanted[name] - base[name].double()
        assert (found[name] - wanted[name]).norm() < F32_PRODUCT * (delta.norm() + base[name].double().norm()), name
    assert not list((short.folder_of(choice)).glob("model*")), "an adapter was written"


@pytest.mark.parametrize("fields", [{"keep": ["*.v_proj.weight"]}, {"scope": "all"}, {"post": ["svc"]}])
def test_a_recipe_with_ways_of_its_own_is_merged_whole(
    recipe: Recipe, fields: dict[str, object], tmp_path: Path
) -> None:
    own = make_recipe({**recipe.model_dump(exclude_defaults=True), **fields})
    assert not Merges(own, tmp_path, RunSettings()).is_factored(MergeChoice("average"))


def test_entries_are_merged_whole(recipe: Recipe, tmp_path: Path) -> None:
    assert not Merges(recipe, tmp_path, RunSettings()).is_factored(MergeChoice("ties"))


def test_progress_is_told_where_no_bar_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_search(quiet=False) as progress:
        progress.doing("asking math")
    assert "0 s: asking math" in capsys.readouterr().err
    with showing_search(quiet=True) as progress:
        progress.doing("asking math")
    assert capsys.readouterr().err == ""
