"""Groups of layers: which group a parameter in memory is of, and how often a search plans a choice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.family import experts_of, tuned
from tests.helpers.models import CASES, Case
from torch import nn

from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import StatisticsError
from actmat.extras.tune.groups import FIXED, groups_of
from actmat.extras.tune.live import LiveModel, group_numbers, state_of
from actmat.recipe import Recipe
from actmat.run import plan_recipe, prepare
from actmat.run.automatic import TABLE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_groups_in_memory_are_those_of_a_loaded_checkpoint_of_numbers(case: Case, tmp_path: Path) -> None:
    """Loading renames, stacks or transposes tensors: a checkpoint of group numbers shows what becomes of each."""
    case.build().save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    names = ("even", "odd", FIXED)
    groups = {name: names[sum(name.encode()) % 3] for name in stored}
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    numbered = {n: torch.full(t.shape, float(names.index(groups[n]))) for n, t in stored.items()}
    save_file(numbered, tmp_path / "numbers" / "model.safetensors", {"format": "pt"})
    expected = state_of(case.loader.from_pretrained(tmp_path / "numbers", dtype=torch.float32))
    model = case.loader.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with open_checkpoint(tmp_path / "base") as base:
        found = group_numbers(model, base, groups, names)
    parameters = {n for n, _ in model.named_parameters()} & expected.keys()
    assert parameters <= found.keys()
    for name in parameters:
        assert bool((expected[name] == found[name]).all()), name


def test_a_changed_parameter_of_no_known_group_is_refused() -> None:
    """A model of load= that calls its tensors otherwise; with one group, any name will do."""
    torch.manual_seed(0)
    live = LiveModel(nn.Linear(2, 2), ("all", FIXED), {"weight": torch.zeros(1, dtype=torch.uint8)})
    with pytest.raises(StatisticsError, match="'bias' changes in a merge"):
        live.direction("d", lambda: nn.Linear(2, 2))


def test_one_plan_says_which_tensors_obey_the_scale(family: Path) -> None:
    experts = tuple(map(str, experts_of(family)))
    rules = [
        {"match": ["*.0.*up_proj*"], "options": {"density": 0.5}},
        {"match": ["*up_proj*"], "scale": 1.0},
        {"match": ["*lm_head*"], "keep": "base"},
    ]
    recipe = Recipe.model_validate({"base": str(family / "base"), "experts": experts, "method": "ties", "rules": rules})
    groups = groups_of(plan_recipe(recipe), "none")
    fixed = {name for name, group in groups.items() if group == FIXED}
    assert "lm_head.weight" in fixed
    assert "model.layers.1.mlp.up_proj.weight" in fixed, "a rule gives it a scale of its own"
    assert not any("layers.0.mlp" in name or "q_proj.weight" in name for name in fixed)
    assert all(name in fixed for name in groups if "norm" in name), "averaged"


def test_a_search_plans_each_merge_once(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: Counter[str] = Counter()
    real = prepare.build_plan

    def counting(recipe: Recipe, *args: Any, **more: Any) -> Any:
        plans[f"{recipe.method} {recipe.dtype}"] += 1
        return real(recipe, *args, **more)

    monkeypatch.setattr(prepare, "build_plan", counting)
    tuned(family, tmp_path / "best", budget=4, space={"methods": ["average", "tsv"], "scales": [1.0]})
    auto = TABLE["full", "decoder"].method
    in_float32 = {method: n for method, n in plans.items() if method.endswith("float32")}
    assert in_float32 == {"average float32": 1, "tsv float32": 1, f"{auto} float32": 1}
    assert sum(plans.values()) - 3 == 3, "the memory of two merges, and the chosen one"
