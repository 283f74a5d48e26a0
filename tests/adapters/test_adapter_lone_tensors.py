"""Tensors outside a method's scope that only some adapters train: the mean over those, for every output."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.adapters.test_adapter_outputs_agree import save_base
from tests.adapters.test_adapter_to_adapter import deltas_of
from tests.helpers.adapters import save_adapter, tiny
from torch import Tensor

import actmat
from actmat.errors import MergeError

GPT2: dict[str, Any] = {"r": 2, "fan_in_fan_out": True}
LONE: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "embedding": (
        "gpt2",
        {**GPT2, "target_modules": ["c_attn", "wpe"]},
        {**GPT2, "target_modules": ["c_attn"]},
        "transformer.wpe.weight",
    ),
    "lora_bias": (
        "gpt2",
        {**GPT2, "target_modules": ["c_fc"], "lora_bias": True},
        {**GPT2, "target_modules": ["c_fc"]},
        "transformer.h.0.mlp.c_fc.bias",
    ),
    "modules_to_save": (
        "vit",
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["classifier"]},
        {"r": 2, "target_modules": ["q_proj"]},
        "classifier.bias",
    ),
}
"""Family, the adapter `one` that trains the tensor, the adapter `two` that does not, and the tensor."""


@pytest.fixture(scope="module", params=LONE)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Folder with `base`, `one`, `two` and `full` (`two` folded into the base), the family and the tensor."""
    family, one, two, name = LONE[request.param]
    folder = tmp_path_factory.mktemp("lone")
    save_base(folder / "base", family)
    save_adapter(folder / "one", family, 1, **one)
    trained = save_adapter(folder / "two", family, 2, **two)
    assert torch.equal(trained[name], tiny(family).state_dict()[name])
    save_base(folder / "full", family, trained)
    return folder, family, name


def delta(folder: Path, family: str, name: str, to: str, experts: list[Any], **fields: Any) -> Tensor:
    """What the merge adds to one tensor."""
    settings: dict[str, Any] = {"compute_dtype": "float64", "durable": False, "threads": 1, "method": "actmat"}
    out = folder / f"out-{to}"
    actmat.merge(folder / "base", experts, out=out, to=to, overwrite=True, **settings | fields)
    if to == "adapter":
        return deltas_of(out, family)[name]
    base, merged = (load_file(f / "model.safetensors")[name] for f in (folder / "base", out))
    return merged - base


@pytest.mark.parametrize("to", ["adapter", "model"])
def test_the_mean_is_over_the_adapters_that_train_it(to: str, case: tuple[Path, str, str]) -> None:
    folder, family, name = case
    own = deltas_of(folder / "one", family)[name]
    assert float(own.norm()) > 0
    found = delta(folder, family, name, to, [folder / "one", folder / "two"])
    torch.testing.assert_close(found, own, rtol=1e-10, atol=1e-12)
    again = delta(folder, family, name, to, [folder / "two", folder / "one"], method="average")
    torch.testing.assert_close(again, own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("to", ["adapter", "model"])
def test_weights_of_the_others_do_not_shrink_it(to: str, case: tuple[Path, str, str]) -> None:
    folder, family, name = case
    experts = [{"path": str(folder / n), "weight": w} for n, w in (("one", 3.0), ("two", 1.0), ("two", -4.0))]
    own = deltas_of(folder / "one", family)[name]
    found = delta(folder, family, name, to, [e | {"name": str(i)} for i, e in enumerate(experts)],
                  method="ties")  # fmt: skip
    torch.testing.assert_close(found, own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("to", ["adapter", "model"])
@pytest.mark.parametrize("weight", [0.6, 1.0, -0.5])
def test_a_sum_adds_it_with_its_weight(to: str, weight: float, case: tuple[Path, str, str]) -> None:
    folder, family, name = case
    experts = [{"path": str(folder / n), "weight": w} for n, w in (("one", weight), ("two", 0.8))]
    own = deltas_of(folder / "one", family)[name]
    fields = {"method": "task_arithmetic", "options": {"scaling": 1.0}}
    in_full = to == "adapter" and name.startswith("classifier")  # no delta without the base
    if in_full and weight < 0:
        with pytest.raises(MergeError, match=r"needs the base\. Write a full model"):
            delta(folder, family, name, to, experts, **fields)
        return
    found = delta(folder, family, name, to, experts, **fields)
    torch.testing.assert_close(found, own if in_full else weight * own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("to", ["adapter", "model"])
def test_the_plan_says_so(to: str, case: tuple[Path, str, str]) -> None:
    folder, _, name = case
    plan = actmat.plan(folder / "base", [folder / "one", folder / "two"], to=to)
    item = plan.by_name.get(name) or plan.by_name[name.rpartition(".")[0]]
    assert (item.action == "average") or (item.is_module and name.endswith(".bias"))
    assert "over the experts that have it; not in two" in item.reason


def test_with_a_full_checkpoint_all_experts_count(case: tuple[Path, str, str]) -> None:
    """A checkpoint that stores the base's values says that they are to stay."""
    folder, family, name = case
    own = deltas_of(folder / "one", family)[name]
    found = delta(folder, family, name, "model", [folder / "one", folder / "full"])
    torch.testing.assert_close(found, own / 2, rtol=1e-10, atol=1e-12)
    plan = actmat.plan(folder / "base", [folder / "one", folder / "two", folder / "full"])
    assert "not in" not in plan.by_name[name].reason
    found = delta(folder, family, name, "model", [folder / "one", folder / "two", folder / "full"])
    torch.testing.assert_close(found, own / 3, rtol=1e-10, atol=1e-12)


def test_weights_that_cancel_out_have_no_mean(case: tuple[Path, str, str]) -> None:
    folder, family, name = case
    experts = [{"path": str(folder / "one"), "name": n, "weight": w} for n, w in (("a", 1.0), ("b", -1.0))]
    for to in ("adapter", "model"):
        with pytest.raises(MergeError, match=r"a sum other than 0|total weight 0"):
            delta(folder, family, name, to, experts, method="ties")


def test_a_tensor_of_no_weight_is_refused(tmp_path: Path) -> None:
    """Without the base an adapter cannot hold the base's own values."""
    family, one, two, _ = LONE["modules_to_save"]
    save_adapter(tmp_path / "one", family, 1, **one)
    save_adapter(tmp_path / "two", family, 2, **two)
    experts = [{"path": str(tmp_path / n), "weight": w} for n, w in (("one", 0.0), ("two", 1.0))]
    with pytest.raises(MergeError, match="trained in full in one only, of total weight 0"):
        actmat.plan(experts=experts, method="task_arithmetic")
    assert actmat.plan(experts=experts, method="task_arithmetic", keep=["classifier.*"]).kept
