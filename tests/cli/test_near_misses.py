"""A flag or a word that is almost right: the error names the right one. One cause is one line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.merging import actmat as run

import actmat
from actmat.errors import MergeError, by_cause
from actmat.recipe import make_recipe
from actmat.run.automatic import check_options

FLAGS = [
    (["--to", "modl"], "found 'modl', expected model, adapter, extracted, peft, kohya"),
    (["--to", "modl"], "Did you mean 'model'?"),
    (["-m", "TIES"], "Did you mean 'ties'?"),
    (["--dtype", "bf16"], "Did you mean 'bfloat16'?"),
    (["--dtype", "fp16"], "Did you mean 'float16'?"),
    (["--dtype", "bfloat61"], "Did you mean 'bfloat16'?"),
    (["--density", "0.3"], "-o density=VALUE"),
    (["--set", "wieght=1"], "Its flag is --weight."),
    (["--set", "densty=0.3"], "Its flag is -o density=VALUE."),
    (["-e", "one"], "-e NAME=PATH"),
    (["."], "each needs its own flag, -e A -e B"),
    (["two/model.safetensors"], "each needs its own flag, -e A -e B"),
    (["org/code"], "each needs its own flag, -e A -e B"),
    (["--wieght", "1"], "--weight"),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_a_near_miss_is_named(flags: list[str], words: str) -> None:
    result = run(["plan", "-b", "base", "-e", "one", *flags])
    assert result.code != 0
    shown = result.words
    assert words in shown


@pytest.mark.parametrize("name", ["pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_model.bin"])
def test_standard_file_names_take_the_name_of_their_folder(name: str) -> None:
    recipe = make_recipe({"experts": [f"ink/{name}", f"oil/{name}", name]})
    assert recipe.labels == ("ink", "oil", name)


def test_options_of_another_method_are_one_problem() -> None:
    with pytest.raises(MergeError) as error:
        check_options(
            make_recipe(
                {
                    "base": "b",
                    "experts": [{"path": "e", "options": {"density": 0.5}}],
                    "options": {"reduce": "sum"},
                    "rules": [{"match": ["*"], "options": {"k": 1}}],
                }
            )
        )
    assert len(error.value.problems) == 1
    assert "found reduce; density of expert 'e'; k of rules.0. Fix: name the method" in str(error.value)


def test_one_cause_is_one_line() -> None:
    alike = [f"module 'layers.{k}.{n}' has a delta of {8 + k}x24" for k in range(20) for n in ("q", "k", "v")]
    lines = by_cause(["another problem", *alike])
    assert lines == ["another problem", f"{alike[0]} (and 59 more of this kind: 'layers.0.k', 'layers.0.v', ...)"]
    assert by_cause(alike[:3]) == alike[:3]
    error = MergeError("The adapter does not fit.", alike)
    assert len(str(error).splitlines()) == 2
    assert len(error.problems) == 60, "programs get all"


def kohya(path: Path, alpha: float = 4.0) -> Path:
    names = [f"lora_unet_down_blocks_{k}_attentions_0_proj_{n}" for k in range(4) for n in ("in", "out")]
    tensors = {f"{n}.lora_{part}.weight": torch.randn(4, 4) for n in names for part in ("up", "down")}
    save_file(tensors | {f"{n}.alpha": torch.tensor(alpha) for n in names}, path)
    return path


def test_plans_group_the_names_of_kohya(tmp_path: Path) -> None:
    files = [str(kohya(tmp_path / f"{n}.safetensors")) for n in "ab"]
    shown = run(["plan", "-e", files[0], "-e", files[1]]).out
    assert "lora_unet_down_blocks_*_attentions_*_proj_in  4x4" in shown
    assert "name ends in proj_in" in " ".join(shown.split())


def test_an_alpha_of_zero_is_noted(tmp_path: Path) -> None:
    experts = [kohya(tmp_path / "a.safetensors", 0.0), kohya(tmp_path / "b.safetensors")]
    notes = [n.text for n in actmat.plan(experts=experts).notes]
    assert any("'a.safetensors'" in n and "alpha" in n and "changes nothing" in n for n in notes), notes
