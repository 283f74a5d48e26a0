"""What `import actmat` offers, in a fresh interpreter, in any order of use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import actmat
import actmat.plugins
from actmat.errors import RecipeError
from actmat.recipe import make_recipe

SOURCE = str(Path(__file__).parents[2] / "src")


def run(code: str) -> str:
    program = f"import sys; sys.path.insert(0, {SOURCE!r})\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_names_are_complete_and_importing_is_light() -> None:
    found = run(
        "import actmat; print('torch' in sys.modules, dir(actmat) == sorted(actmat.__all__))\n"
        "print([n for n in actmat.__all__ if not hasattr(actmat, n)], actmat.plan.__module__)\n"
        "from actmat import *; print(merge.__module__, MergeError.__module__, tune.__module__)"
    )
    merging, errors, tune = "actmat.api.merging", "actmat.errors", "actmat.extras.tune.tuning"
    assert found.split("\n") == ["False True", f"[] {merging}", f"{merging} {errors} {tune}"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert actmat.merge.__module__ == "actmat.api.merging"
    with pytest.raises(AttributeError, match="no attribute 'shuffel'"):
        actmat.shuffel  # noqa: B018


def test_every_error_is_public() -> None:
    from actmat import errors

    tree = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    assert len(tree) == 7
    assert {n for n in tree if getattr(actmat, n) is getattr(errors, n)} == tree


def test_objects_that_are_no_inputs_are_refused_by_name(tmp_path: Path) -> None:
    model, recipe = torch.nn.Linear(2, 2), make_recipe({"base": "base", "experts": ["a"]})
    with pytest.raises(RecipeError) as refused:
        actmat.merge(model, [tmp_path / "one", model.weight], out=tmp_path / "out")  # type: ignore[list-item]
    assert list(refused.value.problems) == ["experts[1]: expected a path, a hub id or a URL, found Parameter"]
    with pytest.raises(RecipeError, match=r"actmat\.run\.run_recipes"):
        actmat.plan(recipe)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="expected a list, found the one location 'one'"):
        actmat.plan("base", "one")
