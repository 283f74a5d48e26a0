"""Base and experts that are not what they seem, in every merge: swapped, given twice, one that changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import actmat

SHAPES = {f"layers.{k}.{n}.weight": (24, 16) for k in range(2) for n in ("up", "down")} | {"norm.weight": (16,)}
TRAINED = {"base": (), "ann": ("ann",), "bob": ("bob",), "cid": ("cid",), "far": ("ann", "far"), "twin": ("ann",),
           "new": ("new",), "newer": ("new", "bob")}  # fmt: skip
"""Checkpoint -> its stages of training, each an independent change of the first."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity")
    changes = {}
    for k, stage in enumerate(("", "ann", "bob", "cid", "far", "new")):
        rng, size = torch.Generator().manual_seed(k), {"": 1.0, "new": 1.4}.get(stage, 0.01)
        changes[stage] = {n: torch.randn(s, generator=rng) * size for n, s in SHAPES.items()}
    for name, stages in TRAINED.items():
        tensors = {n: sum((changes[s][n] for s in stages), changes[""][n]) for n in SHAPES}
        save_file(tensors, folder / f"{name}.safetensors")
        save_file({n: t.double() for n, t in tensors.items()}, folder / f"wide-{name}.safetensors")
    return folder


CASES: dict[str, tuple[str, tuple[str, ...], list[tuple[str, str]]]] = {
    "right": ("base", ("ann", "bob", "cid"), []),
    "one expert": ("base", ("ann",), []),
    "base as expert": ("base", ("ann", "base"), [("AM201", "'base' equals the base")]),
    "base in another dtype": ("base", ("ann", "wide-base"), [("AM201", "'wide-base' equals")]),
    "twice": ("base", ("ann", "bob", "twin"), [("AM202", "'ann' and 'twin'")]),
    "twice, in another dtype": ("base", ("ann", "bob", "wide-twin"), [("AM202", "'ann' and 'wide-twin'")]),
    "swapped": ("ann", ("base", "bob", "cid"), [("AM205", "give 'base' as the base")]),
    "swapped, two": ("ann", ("bob", "base"), [("AM205", "give 'base' as the base")]),
    "another expert": ("ann", ("bob", "cid"), [("AM205", "the base looks like an expert")]),
    "of another base": (
        "base",
        ("ann", "new"),
        [("AM203", "as far from the base as unrelated weights are: 'new' by 1.3")],
    ),
    "all of another base": ("base", ("new", "newer"), [("AM203", "'new' by 1.3, 'newer' by 1.3")]),
    "trained on": ("base", ("ann", "far"), [("AM205", "give 'ann' as the base")]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_merge_looks_at_the_identity_of_its_inputs(case: str, models: Path, tmp_path: Path) -> None:
    base, experts, wanted = CASES[case]
    report = actmat.merge(
        models / f"{base}.safetensors", [models / f"{e}.safetensors" for e in experts],
        method="task_arithmetic", out=tmp_path / "out", durable=False,
    )  # fmt: skip
    found = [(w.code, w.text.replace(".safetensors", "")) for w in report.warnings]
    assert [code for code, _ in found] == [code for code, _ in wanted]
    assert all(words in text for (_, text), (_, words) in zip(found, wanted, strict=True)), found


def test_a_muted_finding_hides_no_other(models: Path, tmp_path: Path) -> None:
    experts = [models / "ann.safetensors", models / "new.safetensors"]
    fields: dict[str, Any] = {"method": "actmat", "durable": False, "overwrite": True, "out": tmp_path / "out"}
    found = [
        [w.code for w in actmat.merge(models / "base.safetensors", experts, mute=mute, **fields).warnings]
        for mute in ([], ["AM203"])
    ]
    assert found == [["AM203"], ["AM301"]]


UNEQUAL: list[tuple[dict[str, Any], float, bool]] = [
    ({"method": "actmat"}, 3.0, True),
    ({"method": "actmat_ridge"}, 3.0, True),
    ({"method": "actmat"}, 1.5, False),
    ({"method": "tsv"}, 3.0, False),
    ({"method": "actmat", "options": {"normalize": "norm"}}, 3.0, False),
    ({"method": "actmat", "weights": [9.0, 1.0]}, 3.0, False),
]


@pytest.mark.parametrize(("fields", "size", "told"), UNEQUAL)
def test_experts_of_unequal_size(fields: dict[str, Any], size: float, told: bool, models: Path, tmp_path: Path) -> None:
    base, ann = (load_file(models / f"{name}.safetensors") for name in ("base", "ann"))
    save_file({n: t + size * (ann[n] - t).flip(0) for n, t in base.items()}, tmp_path / "big.safetensors")
    experts = [models / "ann.safetensors", tmp_path / "big.safetensors"]
    report = actmat.merge(models / "base.safetensors", experts, **fields, out=tmp_path / "out", durable=False)
    assert [w.code for w in report.warnings] == ["AM301"] * told
    assert all(f"changed the base {size:g} times as much as 'ann" in w.text for w in report.warnings)


def test_a_merge_without_a_base_measures_from_its_first_expert(models: Path, tmp_path: Path) -> None:
    experts = [models / f"{e}.safetensors" for e in ("ann", "bob", "cid")]
    report = actmat.merge(experts=experts, method="average", out=tmp_path / "out", durable=False)
    assert report.warnings == ()


def adapter(path: Path, seed: int, alpha: float = 4.0, dtype: torch.dtype = torch.float32) -> Path:
    rng, module = torch.Generator().manual_seed(seed), "lora_unet_mid_block_attentions_0_proj_in"
    tensors: dict[str, Any] = {"lora_down.weight": (2, 8), "lora_up.weight": (8, 2)}
    stored = {f"{module}.{n}": torch.randn(s, generator=rng).to(dtype) for n, s in tensors.items()}
    save_file(stored | {f"{module}.alpha": torch.tensor(alpha)}, path)
    return path


@pytest.mark.parametrize(
    ("other", "code"),
    [((1,), "AM202"), ((2, 0.0), "AM201"), ((2,), None), ((1, 4.0, torch.bfloat16), "AM202")],
    ids=["twin", "zero", "right", "twin in another dtype"],
)
def test_adapters_are_compared_by_their_factors(other: tuple[Any, ...], code: str | None, tmp_path: Path) -> None:
    experts = [adapter(tmp_path / "a.safetensors", 1), adapter(tmp_path / "b.safetensors", *other)]
    report = actmat.merge(experts=experts, method="average", out=tmp_path / "out.safetensors", durable=False)
    assert [w.code for w in report.warnings] == [code] * (code is not None)
