"""Every configuration of the conformance set gives what mergekit gave, or is refused with a reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tolerances import F32_ELEMENTWISE, F32_SOLVE
from torch import Tensor

from actmat.api.reading import read_recipe
from actmat.errors import MergeError
from actmat.run import run_recipes
from actmat.settings import RunSettings

DATA = Path(__file__).parents[1] / "data" / "mergekit"
SET = json.loads((DATA / "cases.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = {c["name"]: c for c in SET["cases"]}

REFUSED = {  # mergekit merges these; actmat says why it does not
    "linear_zero_sum": "expected weights with a sum other than 0",
}
FAILING = {  # mergekit fails too
    "err_missing_weight": "method 'ties' needs 'weight' for every tensor",
    "err_unknown_method": "mergekit has no method 'tise'. Did you mean 'ties'?",
    "err_shape_mismatch": "'model.layers.0.mlp.down_proj.weight' is 32x64 in the base and 32x80",
    "err_vocab_mismatch": "another vocabulary (68 tokens instead of 64",
    "err_no_base": "method 'ties' needs a base model: it is missing",
    "err_slerp_three": "takes exactly 2 model(s), including the base model; found 3: ./a, ./b, ./c",
    "err_t_per_model": "method 'slerp' needs 't' for every tensor",
    "err_filter_without_default": "its filters leave some without",
    "err_linear_base_unweighted": "method 'linear' needs 'weight' for every tensor",
    "err_slice_lengths": "all sources of a slice need the same number of layers",
    "err_models_and_slices": "expected exactly one of 'models', 'slices' and 'modules', found models and slices",
    "err_base_not_in_slice": "'./base' is not a source of this slice",
}
EXACT = (
    *("ties_readme", "dare_ties_density1", "breadcrumbs", "breadcrumbs_ties", "passthrough_frankenmerge"),
    *("passthrough_selfmerge", "tied_expert", "ignored_keys"),
)
"""Bit for bit."""

ROUNDED = ("slerp_bf16", "ties_bf16")
"""mergekit rounds inputs to `dtype` when it loads them, actmat takes them as they are: given rounded ones here."""

UNION_ORDER = {"<|im_start|>": 65, "<|im_end|>": 66, "<tool>": 67, "<think>": 64}
"""Rows of added tokens in mergekit's output: with several models that add some, their order is that of a set."""

Merge = Callable[..., dict[str, Tensor]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all models that configurations name."""
    folder = tmp_path_factory.mktemp("mergekit")
    for model in ("base", "a", "b", "c", "d", "e", "tied", "lora"):
        shutil.copytree(DATA / model, folder / model)
    shutil.copytree(folder / "a", folder / "n")
    wide = {
        name: t.repeat(2, 1)[:80].contiguous() if "gate" in name or "up_proj" in name else t
        for name, t in load_file(folder / "a" / "model.safetensors").items()
    }
    wide |= {n: t.repeat(1, 2)[:, :80].contiguous() for n, t in wide.items() if "down_proj" in n}
    save_file(wide, folder / "n" / "model.safetensors")
    return folder


@pytest.fixture
def merge(models: Path, tmp_path: Path) -> Merge:
    """Merge a configuration by its name; the output's tensors."""

    def run(name: str, folder: Path = models) -> dict[str, Tensor]:
        file = folder / f"{name}.yml"
        file.write_text(CASES[name]["yaml"], encoding="utf-8")
        recipe = read_recipe(file, {"out": str(tmp_path / name)})
        run_recipes([recipe], RunSettings(threads=1, durable=False))
        return load_file(tmp_path / name / "model.safetensors")

    return run


def rounded_models(models: Path, folder: Path) -> Path:
    """The models with their weights rounded to bfloat16."""
    for model in ("base", "a", "b", "c"):
        shutil.copytree(models / model, folder / model)
        weights = {n: t.bfloat16() for n, t in load_file(folder / model / "model.safetensors").items()}
        save_file(weights, folder / model / "model.safetensors")
    return folder


def sampled(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten()[:: SET["stride"]] for name in sorted(tensors)])


def in_their_order(tensors: dict[str, Tensor], out: Path) -> dict[str, Tensor]:
    """The tensors with the rows of added tokens where mergekit has them."""
    listed = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    rows = {e["content"]: e["id"] for e in listed}
    order = list(range(68))
    for token, place in UNION_ORDER.items():
        order[place] = rows[token]
    return {n: t[order] if "embed_tokens" in n or "lm_head" in n else t for n, t in tensors.items()}


MERGED = [n for n, c in CASES.items() if not c["exit"] and not c["random"] and n not in REFUSED]


@pytest.mark.parametrize("name", MERGED)
def test_output_is_mergekits(name: str, merge: Merge, models: Path, tmp_path: Path) -> None:
    case = CASES[name]
    folder = rounded_models(models, tmp_path / "rounded") if name in ROUNDED else models
    got = merge(name, folder=folder)
    want = load_file(DATA / "outputs.safetensors")[name]
    if name == "tokenizer_union":
        got = in_their_order(got, tmp_path / name)
    found = sampled(got)
    assert (len(got), sum(t.numel() for t in got.values())) == (case["tensors"], case["shapes_total"])
    assert {str(t.dtype).removeprefix("torch.") for t in got.values()} == set(case["dtypes"])
    config = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == case["layers"]
    assert config.get("dtype", config.get("torch_dtype")) == case["dtypes"][0]
    if name in EXACT:
        assert torch.equal(found, want)
        return
    tolerance = case["tolerance"]
    error, limit = (found.double() - want.double()).abs(), tolerance["atol"] + tolerance["rtol"] * want.double().abs()
    assert float((error > limit).double().mean()) <= tolerance.get("mismatch_fraction", 0.0), float(error.max())


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c["random"]])
def test_random_methods_keep_entries_and_rescale(name: str, merge: Merge, models: Path) -> None:
    got, base = merge(name), load_file(models / "base" / "model.safetensors")
    assert len(got) == CASES[name]["tensors"]
    if name not in ("dare_linear_one", "della_linear_random"):
        return
    density, weight = (0.4, 1.0) if name == "dare_linear_one" else (0.7, 0.5)
    expert = load_file(models / "a" / "model.safetensors")
    kept = total = 0
    for key, tensor in got.items():
        moved, delta = (tensor - base[key]).double(), (expert[key] - base[key]).double()
        on = moved != 0
        kept, total = kept + int(on.sum()), total + on.numel()
        if on.any():  # one factor for the tensor: that of the L1 norm, times the weight
            factor = weight * float(delta.abs().sum() / delta[on].abs().sum())
            assert torch.allclose(moved[on], factor * delta[on], rtol=F32_SOLVE, atol=F32_ELEMENTWISE), key
    assert kept / total == pytest.approx(density, abs=0.02)


@pytest.mark.parametrize(("name", "reason"), [*REFUSED.items(), *FAILING.items()])
def test_what_is_refused_says_why(name: str, reason: str, merge: Merge) -> None:
    with pytest.raises(MergeError) as refused:
        merge(name)
    assert reason in str(refused.value), refused.value


def test_every_configuration_is_in_one_group() -> None:
    random = [n for n, c in CASES.items() if c["random"]]
    assert sorted([*MERGED, *random, *REFUSED, *FAILING]) == sorted(CASES)
    assert {n for n, c in CASES.items() if c["exit"]} == set(FAILING)
    assert set(EXACT) | set(ROUNDED) <= set(MERGED)
