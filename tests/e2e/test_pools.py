"""Layers that read the same input, merged as one matrix: `pool` in a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.open_merges import counted, merge_open, merge_tensors, output
from torch import Tensor

import actmat
from actmat.errors import AlignmentError
from actmat.recipe import make_recipe

WIDTH = 12
NAMES = [f"layers.{i}.attn.{p}_proj.weight" for i in range(2) for p in "qkv"]
POOL = ("*.{q,k,v}_proj.weight",)


def model(seed: int, base: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    rows = {"q": 12, "k": 4, "v": 4}
    if base is None:
        return {n: gaussian(rows[n[-len("q_proj.weight")]], WIDTH) for n in NAMES} | {"norm.weight": gaussian(WIDTH)}
    return {n: t + 0.1 * gaussian(*t.shape) for n, t in base.items()}


@pytest.fixture(scope="module")
def family() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    base = model(0)
    return base, [model(s, base) for s in (1, 2, 3)]


def expected(base: dict[str, Tensor], experts: list[dict[str, Tensor]], layer: int) -> Tensor:
    """The published formula in float64 on the stacked deltas: one S for q, k and v."""
    names = NAMES[3 * layer : 3 * layer + 3]
    deltas = [torch.cat([(e[n] - base[n]).double() for n in names]) for e in experts]
    grams = [d.T @ d for d in deltas]
    return sum(d @ g for d, g in zip(deltas, grams, strict=True)) @ torch.linalg.inv(sum(grams))


def test_a_pool_is_one_matrix_in_the_formula(family, tmp_path: Path) -> None:
    base, experts = family
    merged = output(merge_tensors(base, experts, tmp_path, pool=POOL))
    for layer in range(2):
        names = NAMES[3 * layer : 3 * layer + 3]
        found = torch.cat([merged[n].double() - base[n] for n in names])
        want = expected(base, experts, layer)
        assert (found - want).norm() < 1e-5 * want.norm()
    apart = output(merge_tensors(base, experts, tmp_path / "apart"))
    assert (apart[NAMES[0]] - merged[NAMES[0]]).norm() > 1e-2 * (merged[NAMES[0]] - base[NAMES[0]]).norm()
    assert torch.equal(apart["norm.weight"], merged["norm.weight"])


def test_pooled_tensors_are_read_once_by_all_variants(family, tmp_path: Path) -> None:
    base, experts = family
    opened = [counted(base), *(counted(e) for e in experts)]
    variants = [{"pool": POOL}, {"pool": POOL, "method": "actmat_ridge"}]
    both = merge_open(opened[0], opened[1:], tmp_path, variants, workers=2)
    assert [c.read_other_than_once() for c in opened] == [{}] * 4
    for fields, found in zip(variants, both, strict=True):
        alone = output(merge_tensors(base, experts, tmp_path / fields.get("method", "actmat"), **fields))
        assert all(torch.equal(alone[n], found[n]) for n in base)


def test_the_record_names_the_pool(family, tmp_path: Path) -> None:
    base, experts = family
    report = merge_tensors(base, experts, tmp_path, pool=POOL)
    rows = {r["name"]: r for r in report.manifest["tensors"]}
    assert "pooled over 3 tensors" in rows[NAMES[0]]["reason"]
    assert rows[NAMES[0]]["stats"]["rank"] == rows[NAMES[2]]["stats"]["rank"] == WIDTH
    assert actmat.verify(report.out).ok


def test_a_pool_that_cannot_be_is_refused(family, tmp_path: Path) -> None:
    base, experts = family
    with pytest.raises(AlignmentError, match="not all merged by one method"):
        merge_tensors(base, experts, tmp_path / "a", pool=POOL, rules=[{"match": NAMES[1], "method": "tsv"}])
    with pytest.raises(AlignmentError, match="matches no tensor"):
        merge_tensors(base, experts, tmp_path / "b", pool=["*.nothing"])


def test_one_pattern_as_text() -> None:
    recipe = make_recipe({"base": "b", "experts": ["e"], "pool": "*.q"})
    assert recipe.pool == ("*.q",)
