"""Folders of diffusers and single files mixed: SDXL, SD3, Wan and Flux, in the layout of the base, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.single_files import flux_file, write_both

import actmat
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import CheckpointError
from actmat.layout.components import single_file_of

QUICK: dict[str, Any] = {"threads": 1, "durable": False}
KINDS = {"sdxl": "Stable Diffusion XL", "sd3": "Stable Diffusion 3", "wan": "Wan", "flux": "Flux"}


@pytest.fixture(
    scope="module", params=[pytest.param(k, marks=[pytest.mark.slow] if k == "sdxl" else []) for k in KINDS]
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Base and two experts, each in both layouts."""
    home = tmp_path_factory.mktemp(request.param)
    for name, seed in (("base", 0), ("e1", 1), ("e2", 2)):
        write_both(home, name, request.param, seed)
    return request.param, home


@pytest.mark.parametrize(("base", "suffix"), [("base", ".safetensors"), ("base.safetensors", "")],
                         ids=["into_folder", "into_file"])  # fmt: skip
def test_experts_of_either_layout_give_the_same_merge(
    both: tuple[str, Path], tmp_path: Path, base: str, suffix: str
) -> None:
    kind, home = both
    assert single_file_of(load_file(home / "base.safetensors")).kind == KINDS[kind]  # type: ignore[union-attr]
    other = "" if suffix else ".safetensors"
    mixed = actmat.merge(home / base, [home / f"e1{suffix}", home / f"e2{other}"], out=tmp_path / "mixed",
                         method="linear", **QUICK)  # fmt: skip
    alike = actmat.merge(home / base, [home / f"e1{other}", home / f"e2{other}"], out=tmp_path / "alike",
                         method="linear", **QUICK)  # fmt: skip
    copied = [i.name for i in mixed.plan.items if i.action == "copy"]
    assert [n for n in copied if not n.endswith("position_ids")] == []
    with open_checkpoint(mixed.out) as one, open_checkpoint(alike.out) as two, open_checkpoint(home / base) as was:
        assert one.specs.keys() == two.specs.keys() == was.specs.keys()
        assert [n for n in one.specs if not torch.equal(one.read(n), two.read(n))] == []
        changed = [n for n in one.specs if not torch.equal(one.read(n), was.read(n))]
        assert len(changed) > 0.9 * len(one.specs)


def test_a_part_that_the_maps_cannot_read_is_refused_by_name(both: tuple[str, Path], tmp_path: Path) -> None:
    kind, home = both
    found = load_file(home / "e1.safetensors")
    if kind == "flux":  # of another width than diffusers' map is for
        found = {n: t[: len(t) // 2].clone() for n, t in flux_file(1).items()}
        wanted = "diffusers cannot convert any of its tensors"
    elif kind == "wan":
        found = {n: t for n, t in found.items() if "cross_attn.norm_k" in n}
        wanted = "diffusers cannot convert any of its tensors"
    else:
        core = "joint_blocks.1." if kind == "sd3" else "conditioner.embedders.1.model.transformer."
        found = {n.replace(core, "odd." + core): t for n, t in found.items()}
        wanted = "component '(transformer|text_encoder_2)' would not be converted"
    save_file(found, tmp_path / "odd.safetensors")
    with pytest.raises(CheckpointError, match=wanted):
        actmat.plan(home / "base", [tmp_path / "odd.safetensors"])
