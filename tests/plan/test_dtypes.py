"""dtypes of an output's tensors: what transformers and diffusers keep in float32 is kept under a coarser dtype."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.diffusion import unet
from tests.helpers.merging import Family, actmat
from tests.helpers.tinymodels import build, made

from actmat.api.merging import plan
from actmat.errors import AlignmentError

pytestmark = pytest.mark.usefixtures("configs_read_here")
COARSE = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def models() -> dict[str, Any]:
    """Models that keep nothing, in both dtypes, and in float16 only; of diffusers, without and with norms."""
    from diffusers import WanTransformer3DModel

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1}
    wan = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, "num_layers": 1, "text_dim": 16}
    return {
        "llama": build("llama"),
        "glm": made("glm4_moe", **sizes, **heads, **experts, topk_group=1),
        "t5": build("t5"),
        "unet": unet(),
        "wan": WanTransformer3DModel(**wan, freq_dim=16, in_channels=4, out_channels=4),
    }


@pytest.mark.parametrize("name", ["llama", "glm", "t5", "unet", "wan"])
def test_dtypes_are_those_of_a_model_that_is_loaded_in_one(name: str, tmp_path: Path) -> None:
    model = models()[name]
    model.save_pretrained(tmp_path / "base")
    for dtype, value in COARSE.items():
        type(model).from_pretrained(tmp_path / "base", torch_dtype=value).save_pretrained(tmp_path / dtype)
        right = {n: t.dtype for f in (tmp_path / dtype).glob("*.safetensors") for n, t in load_file(f).items()}
        planned = plan(tmp_path / "base", [tmp_path / "base"], method="average", dtype=dtype)
        assert {s.name: getattr(torch, s.dtype) for s in planned.specs} == right
        apart = [n for n, d in right.items() if d != value]
        said = [note.text for note in planned.notes if "not written in" in note.text]
        assert bool(said) == bool(apart)
        assert (
            not apart
            or f"not written in {dtype}, as base or class of the model keep their dtype: {apart[0]}" in said[0]
        )


@pytest.mark.parametrize(("flags", "right"), [
    (["--dtype", "float16"], "float32"), (["--dtype", "float32"], "float32"), (["--dtype", "float64"], "float64"),
    ([], "float32"),
])  # fmt: skip
def test_a_tensor_that_the_base_stores_apart_keeps_its_dtype(family: Family, flags: list[str], right: str) -> None:
    name = "model.norm.weight"
    for folder in (family.base, *family.experts):
        tensors = load_file(folder / "model.safetensors")
        other = {n: t.to(torch.float32 if n == name else torch.bfloat16) for n, t in tensors.items()}
        save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    actmat(family.argv(*flags), code=0)
    merged = load_file(family.out / "model.safetensors")
    assert merged[name].dtype == getattr(torch, right)
    assert {t.dtype for n, t in merged.items() if n != name} == {getattr(torch, flags[-1] if flags else "bfloat16")}
    notes = [n for n in json.loads((family.out / "actmat_manifest.json").read_text())["notes"] if name in str(n)]
    assert bool(notes) == (flags[-1:] == ["float16"])


def test_integers_that_an_expert_changed_are_kept_only_on_request() -> None:
    base = {"w": torch.zeros(4, 3), "router.tid2eid": torch.tensor([1, 2]), "bn.num_batches_tracked": torch.tensor(1)}
    same = {**base, "w": torch.ones(4, 3), "bn.num_batches_tracked": torch.tensor(9)}
    changed = {**same, "router.tid2eid": torch.tensor([2, 1])}
    assert plan(base, {"a": same, "b": same}, method="average").notes == ()
    with pytest.raises(AlignmentError, match=r"'router.tid2eid': integers.*expert 'b'.*--keep"):
        plan(base, {"a": same, "b": changed}, method="average")
    plan(base, {"a": same, "b": changed}, method="average", keep=["router.tid2eid"])
    narrow = {**same, "router.tid2eid": torch.tensor([1, 2], dtype=torch.uint8)}
    plan(base, {"a": same, "b": narrow}, method="average")
    with pytest.raises(AlignmentError, match=r"'router.tid2eid': integers"):
        plan({**base, "router.tid2eid": torch.tensor([1, 258])}, {"b": narrow}, method="average")


def test_a_noise_schedule_is_a_setting_that_is_not_merged() -> None:
    schedule = {"alphas_cumprod": torch.linspace(1, 0.1, 8), "sqrt_alphas_cumprod": torch.linspace(1, 0.1, 8).sqrt()}
    base = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(4, 3), **schedule}
    halved = {name: tensor.half() + 1 * ("model" in name) for name, tensor in base.items()}
    coarse = {**halved, **{name: tensor.bfloat16() for name, tensor in schedule.items()}}
    copied = [item.name for item in plan(base, {"a": halved, "b": coarse}, method="average").items if not item.call]
    assert copied == [*schedule]
    layer = {"posterior_mean.weight": torch.zeros(4, 3)}
    assert plan(layer, {"a": {n: t + 1 for n, t in layer.items()}}, method="average").items[0].call, (
        "a layer of that name"
    )
    other = {**halved, "alphas_cumprod": torch.linspace(1, 0, 8), "sqrt_alphas_cumprod": torch.linspace(1, 0, 8)}
    with pytest.raises(
        AlignmentError, match=r"'alphas_cumprod', 'sqrt_alphas_cumprod': integers, or a noise schedule.*'b'"
    ) as error:
        plan(base, {"a": halved, "b": other}, method="average")
    assert len(error.value.problems) == 1
    plan(base, {"a": halved, "b": other}, method="average", keep=[*schedule])
