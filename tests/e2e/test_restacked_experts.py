"""Mixtures of which one input stores the experts one by one, and another stacks them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.tinymodels import build
from tests.tolerances import F32_ELEMENTWISE
from torch import Tensor

import actmat
from actmat.errors import MergeError

SEPARATE = {"mixtral": ("block_sparse_moe.experts.{}.w1", "w3", "w2"),
            "qwen2_moe": ("mlp.experts.{}.gate_proj", "up_proj", "down_proj")}  # fmt: skip


LAYER = "model.layers.0.block_sparse_moe.experts"


def noisy(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {n: t + 0.1 * torch.randn(t.shape, generator=made) for n, t in tensors.items()}


def one_by_one(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """The tensors in memory as the family has them on disk, transcribed."""
    first, up, down = SEPARATE[family]
    out = {}
    for name, tensor in tensors.items():
        at, _, part = name.partition("mlp.experts.")
        for e in range(len(tensor)) if part else ():
            stem = at + first.format(e)
            if part == "gate_up_proj":
                half = tensor.shape[1] // 2
                out[f"{stem}.weight"] = tensor[e, :half].clone()
                out[f"{stem.rpartition('.')[0]}.{up}.weight"] = tensor[e, half:].clone()
            else:
                out[f"{stem.rpartition('.')[0]}.{down}.weight"] = tensor[e].clone()
        if not part:
            plain = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if family == "mixtral" else name
            out[plain] = tensor.clone()
    return out


def saved(folder: Path, tensors: dict[str, Tensor], family: str) -> Path:
    model = build(family)
    model.config.num_experts_per_tok = 2
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def logits(folder: Path) -> Tensor:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        out: Tensor = model(torch.arange(1, 20)[None]).logits
    return out


@pytest.mark.parametrize("family", SEPARATE)
@pytest.mark.parametrize("stacked", ["base", "expert"])
def test_the_output_has_the_bases_layout(family: str, stacked: str, tmp_path: Path) -> None:
    memory = build(family).state_dict()
    base, tuned = noisy(memory, 1), noisy(memory, 2)
    both = {"base": base, "expert": tuned}
    for name, tensors in both.items():
        saved(tmp_path / name, tensors if name == stacked else one_by_one(tensors, family), family)
        saved(tmp_path / f"{name}-alike", tensors if stacked == "base" else one_by_one(tensors, family), family)
    shutil.copytree(tmp_path / "base", tmp_path / "same")
    reports = {}
    for end in ("", "-alike"):
        for method in ("actmat", "average"):
            reports[method + end] = actmat.merge(
                tmp_path / "base", [tmp_path / f"expert{end}", tmp_path / "same"], out=tmp_path / f"{method}{end}",
                method=method, scope="all" if method == "average" else "linear", durable=False,
            )  # fmt: skip
    for method in ("actmat", "average"):
        found, alike = (load_file(tmp_path / f"{method}{end}" / "model.safetensors") for end in ("", "-alike"))
        assert found.keys() == alike.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
        assert all(torch.equal(found[n], alike[n]) for n in found)
    mean = {n: (base[n] + tuned[n]) / 2 for n in memory}
    expected = mean if stacked == "base" else one_by_one(mean, family)
    assert all(torch.allclose(found[n], t, atol=F32_ELEMENTWISE) for n, t in expected.items())
    shutil.rmtree(tmp_path / "expert-alike")
    notes = " ".join(map(str, reports["average"].plan.notes))
    assert f"experts of a mixture are read {'stacked' if stacked == 'base' else 'one by one'}" in notes
    assert "lacks" not in notes
    assert torch.equal(logits(tmp_path / "average"), logits(tmp_path / "average-alike"))
    saved(tmp_path / "mean", one_by_one(mean, family), family)
    assert torch.allclose(logits(tmp_path / "average"), logits(tmp_path / "mean"), atol=F32_ELEMENTWISE)
    assert actmat.verify(tmp_path / "average", inputs=True).problems == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{LAYER}.1.w3.weight"), "the other has only 5 parts of it"),
        (
            lambda t: t.update({f"{LAYER}.{e}.w2.weight": torch.ones(32, 40) for e in range(3)}),
            "'model.layers.0.mlp.experts.down_proj' is 3x32x48, .* make 3x32x40",
        ),
        (
            lambda t: t.update({f"{LAYER}.1.w2.weight": torch.ones(32, 40)}),
            "its parts in the other have several shapes",
        ),
    ],
)  # fmt: skip
def test_stacks_that_do_not_fit_are_refused(change: Any, says: str, tmp_path: Path) -> None:
    memory = build("mixtral").state_dict()
    tuned = one_by_one(memory, "mixtral")
    change(tuned)
    base = saved(tmp_path / "base", dict(memory), "mixtral")
    with pytest.raises(MergeError, match=says):
        actmat.plan(base, [saved(tmp_path / "e", tuned, "mixtral")])


def test_other_ways_of_stacking_are_refused(tmp_path: Path) -> None:
    memory = build("gpt_oss").state_dict()
    single = {n: t for n, t in memory.items() if not n.endswith(("gate_up_proj", "down_proj"))}
    for layer in range(2):
        for e in range(3):
            at = f"model.layers.{layer}.mlp.experts"
            gate_up, down = memory[f"{at}.gate_up_proj"][e], memory[f"{at}.down_proj"][e]
            single |= {f"{at}.{e}.gate_proj.weight": gate_up[:, ::2].T, f"{at}.{e}.up_proj.weight": gate_up[:, 1::2].T}
            single[f"{at}.{e}.down_proj.weight"] = down.T
    base = saved(tmp_path / "base", dict(memory), "gpt_oss")
    with pytest.raises(MergeError, match=r"stacked in another way .*alternating") as error:
        actmat.plan(base, [saved(tmp_path / "e", single, "gpt_oss")])
    assert "--keep" not in str(error.value)
    assert "save_pretrained" in str(error.value)
