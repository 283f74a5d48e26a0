"""Files of LyCORIS: each algorithm against a transcription of the library's formulas, on a UNet and a text encoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.lora_files import TEXT, UNET, random_factors, save_kohya, tiny_text, tiny_unet, weights_of
from tests.helpers.merging import actmat as run
from torch import Tensor

import actmat
from actmat.errors import MergeError
from actmat.report.verify import verify

FC, CONV, ATTENTION = UNET[4], UNET[5], UNET[1]
RUN: dict[str, Any] = {"durable": False, "threads": 1, "compute_dtype": "float64", "scope": "all"}
SUM: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 1.0}}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def loha(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """`functional.loha.diff_weight`: the second kernel axis lies flat in `w1_b`."""
    o, i = weight.shape[0], weight[0].numel()
    w = {"w1_a": random(o, 2), "w1_b": random(2, i), "w2_a": random(o, 2, seed=1), "w2_b": random(2, i, seed=1)}
    delta = (w["w1_a"] @ w["w1_b"]) * (w["w2_a"] @ w["w2_b"]) * (3.0 / 2)
    return {f"hada_{n}": t for n, t in w.items()} | {"alpha": torch.tensor(3.0)}, delta.view(weight.shape)


def tucker_loha(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """With cores: `einsum('i j ..., i p, j r -> p r ...', t, wa, wb)`, `wa` with the rank first."""
    o, i, *k = weight.shape
    delta = torch.ones_like(weight)
    stored = {"alpha": torch.tensor(1.0)}
    for n in (1, 2):
        wa, wb, t = random(2, o, seed=n), random(2, i, seed=n), random(2, 2, *k, seed=n)
        stored |= {f"hada_w{n}_a": wa, f"hada_w{n}_b": wb, f"hada_t{n}": t}
        delta *= torch.einsum("ij...,ip,jr->pr...", t, wa, wb)
    return stored, delta * (1.0 / 2)


def lokr(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """`W1` whole and `W2` a product; a kernel is flat in `w2_b`."""
    o, i, *k = weight.shape
    w1, a, b = random(2, 2), random(o // 2, 3), random(3, i // 2 * int(torch.tensor(k).prod()))
    w2 = (a @ b).view(o // 2, i // 2, *k)
    delta = torch.kron(w1.view(2, 2, *(1 for _ in k)), w2) * (5.0 / 3)
    return {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b, "alpha": torch.tensor(5.0)}, delta


def whole_lokr(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Both whole: the scale is 1, whatever alpha says."""
    o, i, *k = weight.shape
    w1, w2 = random(2, 2), random(o // 2, i // 2, *k)
    stored = {"lokr_w1": w1, "lokr_w2": w2, "alpha": torch.tensor(9999.0)}
    return stored, torch.kron(w1.view(2, 2, *(1 for _ in k)), w2)


def locon(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """With a core: `lora_mid`."""
    o, i, *k = weight.shape
    up, down, mid = random(o, 2, *(1 for _ in k)), random(2, i, *(1 for _ in k)), random(2, 2, *k)
    delta = torch.einsum("ij...,ip,jr->pr...", mid, up.flatten(1).mT, down.flatten(1)) * (1.0 / 2)
    stored = {"lora_up.weight": up, "lora_down.weight": down, "lora_mid.weight": mid, "alpha": torch.tensor(1.0)}
    return stored, delta


def ia3(weight: Tensor, of_inputs: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """`_ia3_weight`: the base times the numbers, on the axis of the inputs or of the outputs."""
    factors = random(weight.shape[1 if of_inputs else 0])
    own = [1] * weight.ndim
    own[1 if of_inputs else 0] = -1
    return {"weight": factors, "on_input": torch.tensor(int(of_inputs))}, weight * factors.view(own)


def ia3_of_inputs(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return ia3(weight, of_inputs=True)


def dora(weight: Tensor, make: Any = None) -> tuple[dict[str, Tensor], Tensor]:
    """`_weight_decompose` on outputs: the merged weight, scaled to norms that are stored."""
    o, i, *k = weight.shape
    if make is None:
        up, down = random(o, 2, *(1 for _ in k)), random(2, i, *k)
        stored = {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(1.0)}
        delta = (up.flatten(1) @ down.flatten(1)).view(weight.shape) * (1.0 / 2)
    else:
        stored, delta = make(weight)
    scale = random(o, *(1 for _ in weight.shape[1:])).abs() + 0.5
    merged = weight + delta
    norm = merged.reshape(o, -1).norm(dim=1).reshape(scale.shape)
    return stored | {"dora_scale": scale}, merged * (scale / norm) - weight


def dora_of_loha(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return dora(weight, loha)


CASES = [
    (loha, FC), (loha, CONV), (tucker_loha, CONV), (lokr, FC), (lokr, CONV), (whole_lokr, CONV), (locon, CONV),
    (ia3, FC), (ia3, CONV), (ia3_of_inputs, CONV), (dora, ATTENTION), (dora, CONV), (dora_of_loha, FC),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lycoris")
    for name, model in (("unet", tiny_unet()), ("text", tiny_text())):
        save_folder(folder / name, weights_of(model), {"architectures": [type(model).__name__]})
    return folder


def named(prefix: str, module: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{module.replace('.', '_')}.{role}": t for role, t in stored.items()}


@pytest.mark.parametrize("is_comfy", [False, True])
@pytest.mark.parametrize(("make", "module"), CASES, ids=[f"{m.__name__}-{n[-5:]}" for m, n in CASES])
def test_the_delta_is_that_of_the_library(make: Any, module: str, is_comfy: bool, place: Path, tmp_path: Path) -> None:
    base = load_file(place / "unet" / "model.safetensors")
    stored, delta = make(base[f"{module}.weight"])
    dotted = {f"diffusion_model.{module}.{role}": tensor for role, tensor in stored.items()}
    save_file(dotted if is_comfy else named("lora_unet_", module, stored), tmp_path / "x.safetensors")
    actmat.merge(place / "unet", [tmp_path / "x.safetensors"], out=tmp_path / "out", **RUN, **SUM)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in base.items():
        expected = tensor + delta if name == f"{module}.weight" else tensor
        torch.testing.assert_close(found[name], expected, rtol=1e-11, atol=1e-11, msg=name)


@pytest.fixture(scope="module")
def mixed(place: Path) -> Path:
    """A file with several algorithms, of a UNet and a text encoder."""
    base, text = (load_file(place / n / "model.safetensors") for n in ("unet", "text"))
    tensors = named("lora_unet_", FC, loha(base[f"{FC}.weight"])[0])
    tensors |= named("lora_unet_", ATTENTION, dora(base[f"{ATTENTION}.weight"])[0])
    tensors |= named("lora_te_", TEXT[0], lokr(text[f"{TEXT[0]}.weight"])[0])
    save_file(tensors, place / "mixed.safetensors")
    return place / "mixed.safetensors"


def test_each_component_gets_its_modules(place: Path, mixed: Path, tmp_path: Path) -> None:
    plan = actmat.plan(place / "unet", [mixed])
    assert any("the base has no text_encoder: the adapter's 1 modules" in n for n in map(str, plan.notes))
    base = load_file(place / "text" / "model.safetensors")
    actmat.merge(place / "text", [mixed], out=tmp_path / "out", **RUN, **SUM)
    found = load_file(tmp_path / "out" / "model.safetensors")
    name = f"{TEXT[0]}.weight"
    torch.testing.assert_close(found[name], base[name] + lokr(base[name])[1], rtol=1e-11, atol=1e-11)
    checked = verify(tmp_path / "out")
    assert checked.ok
    assert checked.inputs == ("base", "mixed.safetensors")


def test_it_is_merged_beside_plain_lora_and_extracted(place: Path, mixed: Path, tmp_path: Path) -> None:
    save_kohya(tmp_path / "plain.safetensors", random_factors(tiny_unet(), UNET, 1, alpha=1.0))
    experts = [mixed, tmp_path / "plain.safetensors"]
    report = actmat.merge(place / "unet", experts, out=tmp_path / "out", method="actmat", **RUN)
    assert sum(i.action == "merge" for i in report.plan.items) == 6
    given: dict[str, Any] = {"method": "average", "to": "adapter", "rank": 2}
    adapter = actmat.merge(place / "unet", experts, out=tmp_path / "adapter", **RUN, **given)
    assert verify(adapter.out).ok


def test_inspect_says_what_is_in_it(mixed: Path) -> None:
    words = run(["inspect", mixed], code=0).words
    for part in (
        "LoHa",
        "LoRA with DoRA's magnitudes",
        "LoKr",
        "text_encoder (1)",
        "unet (2)",
        "merged with its base only",
        "hada_w1_a",
        "dora_scale",
    ):
        assert part in words


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"hada_w1_a": random(4, 2)}, "has no hada_w1_b"),
        ({"lokr_w1": random(2, 2)}, "no Kronecker product"),
        ({"on_input": torch.tensor(1)}, "has no weight"),
        ({"lora_up.weight": random(4, 2), "dora_scale": random(4, 1)}, "has no lora_down"),
        ({"hada_w1_a": random(4, 2), "oft_blocks": random(2, 2)}, "LyCORIS's other algorithms are not supported"),
        ({"dora_scale": random(4, 1)}, "has dora_scale and no factors"),
        ({**whole_lokr(torch.empty(8, 8))[0], "dora_scale": random(1, 8)}, "scales inputs"),
        ({**loha(torch.empty(8, 9))[0]}, "does not fit|its delta is 8 x 9"),
        ({**loha(torch.empty(8, 8))[0], "alpha": torch.tensor(float("nan"))}, "expected a finite number"),
    ],
)
def test_what_is_damaged_or_not_read_is_named(
    stored: dict[str, Tensor], words: str, place: Path, tmp_path: Path
) -> None:
    save_file(named("lora_unet_", ATTENTION, stored), tmp_path / "x.safetensors")
    with pytest.raises(MergeError, match=words):
        actmat.plan(place / "unet", [tmp_path / "x.safetensors"])


def test_modules_of_another_model_and_outputs_without_a_base_are_refused(place: Path, mixed: Path) -> None:
    with pytest.raises(MergeError, match="with its base only"):
        actmat.plan(None, [mixed])
    save_file(named("lora_unet_", "x.y", loha(torch.empty(4, 4))[0]), place / "other.safetensors")
    with pytest.raises(MergeError, match=r"matches no tensor.*--drop 'lora_unet_x_y\.\*'"):
        actmat.plan(place / "unet", [place / "other.safetensors"])
