"""A search merges adapters into adapters, and switches them onto one base."""

from pathlib import Path

import pytest
import torch
from tests.tolerances import F32_PRODUCT

from actmat.cli import screen
from actmat.cli.screen import showing_progress
from actmat.extras.tune.live import LiveAdapter, Loader
from actmat.extras.tune.merges import Merges, search_inputs
from actmat.extras.tune.space import MergeChoice
from actmat.progress import Progress
from actmat.recipe import Recipe, make_recipe
from actmat.recipe.output import AdapterOutput
from actmat.settings import RunSettings


@pytest.fixture(scope="module")
def recipe(models: Path) -> Recipe:
    return make_recipe({"base": f"{models}/base", "experts": [f"{models}/adapters/{n}" for n in ("math", "code")]})


def merges_of(recipe: Recipe, folder: Path) -> Merges:
    return Merges(recipe, folder, RunSettings(), Progress())


@pytest.mark.parametrize("method", ["average", "tsv"])
def test_the_answers_are_those_of_whole_merges(recipe: Recipe, method: str, tmp_path: Path) -> None:
    choice, ids = MergeChoice(method), {"input_ids": torch.tensor([[1, 2, 3]])}
    short = merges_of(recipe.model_copy(update={"output": AdapterOutput()}), tmp_path / "short")
    whole = merges_of(recipe, tmp_path / "whole")
    live, loader = LiveAdapter(Loader(recipe.base)), Loader(recipe.base)
    for merges in (short, whole):
        assert merges.make([choice]) == [choice], merges.refused
    live.take(str(short.folder_of(choice)))
    with torch.no_grad():
        start = loader.load(recipe.base).model(**ids).logits
        wanted = loader.load(str(whole.folder_of(choice))).model(**ids).logits
        at_one, at_two, at_zero = (live.scaled(s)(**ids).logits for s in (1.0, 2.0, 0.0))
    assert (at_one - wanted).norm() < F32_PRODUCT * wanted.norm()
    assert (at_two - at_one).norm() > 0
    assert torch.equal(at_zero, start)


@pytest.mark.parametrize(
    "fields", [{"keep": ["*.v_proj.weight"]}, {"scope": "all"}, {"post": ["isotropize"]}, {"space": "pico"}]
)
def test_recipes_with_ways_of_their_own_are_merged_whole(recipe: Recipe, fields: dict[str, object]) -> None:
    own = make_recipe({**recipe.model_dump(exclude_defaults=True), **fields})
    with search_inputs(own) as inputs, search_inputs(recipe) as plain:
        assert (inputs.are_adapters, plain.are_adapters) == (False, True)


def test_progress_is_told_where_no_bar_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage once, and counts with the time left in between."""
    monkeypatch.setattr(screen, "BETWEEN_LINES", 0.0)
    with showing_progress(quiet=False, lines=True) as progress:
        progress.doing("asking math", 8)
        progress.doing("asking math", 8)
        progress.done(2)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "0 s: asking math: 8"
    assert second.startswith("0 s: asking math: 2 of 8, about ")
    with showing_progress(quiet=True, lines=True) as progress:
        progress.doing("asking math")
    assert capsys.readouterr().err == ""
