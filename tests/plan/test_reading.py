"""What is held of a part: the plan counts by it, the engine reads by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import actmat
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.plan.parts import CHUNK, HELD_BYTES, Part
from actmat.plan.reading import Reading, reading_of

SMALL, LARGE = CHUNK, HELD_BYTES // 8 + 1


def read(name: str, numel: int, *, experts: int = 2, options: dict[str, Any] | None = None, **how: bool) -> Reading:
    method = get_method(name)
    part = Part(0, numel, (numel,), TensorLayout(Role.VECTOR, ""))
    settings = {"can_walk": True, "measured": False} | how
    return reading_of(method, method.resolve_options(options or {}), part, experts, 4, **settings)


HELD = Reading(walked=False, combined=False, lazy=False, base=True)
ONE_BY_ONE = Reading(walked=False, combined=False, lazy=True, base=True)


@pytest.mark.parametrize(
    ("name", "numel", "expected"),
    [
        ("breadcrumbs", LARGE, HELD),
        ("average", SMALL, ONE_BY_ONE),
        ("dare", SMALL, Reading(walked=True, combined=False, lazy=True, base=True)),
        ("dare", 2 * CHUNK, Reading(walked=True, combined=False, lazy=True, base=False)),
        ("ties", 2 * CHUNK, Reading(walked=True, combined=False, lazy=False, base=True)),
        ("ties", LARGE, Reading(walked=True, combined=False, lazy=True, base=False)),
        ("karcher", SMALL, Reading(walked=True, combined=False, lazy=False, base=True)),
        ("karcher", 2 * CHUNK, Reading(walked=True, combined=True, lazy=True, base=False)),
        ("karcher", LARGE, Reading(walked=True, combined=True, lazy=True, base=False)),
    ],
)
def test_a_rule_that_is_alone(name: str, numel: int, expected: Reading) -> None:
    assert read(name, numel) == expected


def test_who_else_looks_is_given_what_it_looks_at() -> None:
    for name in ("dare", "ties", "karcher", "model_stock"):
        assert read(name, LARGE, measured=True) == HELD
        assert read(name, LARGE, can_walk=False) == HELD
        assert read(name, LARGE, copied=True).base
        assert not read(name, LARGE).base
    assert read("average", SMALL, measured=True) == HELD
    assert read("ties", LARGE, options={"trim": "global"}) == HELD


def test_deltas_in_memory() -> None:
    assert [read(name, LARGE).deltas(5) for name in ("breadcrumbs", "average", "ties")] == [5, 1, 0]
    assert read("breadcrumbs", LARGE, experts=1) == HELD, "one delta that a rule may look at twice is no lazy one"


@pytest.mark.parametrize("method", ["tsv", "breadcrumbs", "ties", "model_stock", "karcher", "slerp"])
def test_one_expert_may_be_looked_at_as_often_as_a_rule_likes(method: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "expert"):
        (tmp_path / name).mkdir()
        weight = torch.randn(800, 700, generator=generator)  # more than a piece
        save_file({"layers.0.mlp.up_proj.weight": weight}, tmp_path / name / "model.safetensors")
    out = tmp_path / "out"
    actmat.merge(tmp_path / "base", [tmp_path / "expert"], method=method, out=out, scope="all", durable=False)
    (value,) = load_file(out / "model.safetensors").values()
    assert bool(value.isfinite().all())
