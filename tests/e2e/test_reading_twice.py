"""Matrices whose deltas are read a second time when their gain is known: what is read how often, and the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.counting import CountingCheckpoint
from tests.helpers.open_merges import counted, merge_open
from tests.tolerances import F32_SOLVE, relative_error
from torch import Tensor

from actmat.linalg import panels
from actmat.linalg.interference import rereading
from actmat.methods import get_method

PLACES = ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj")
TALL, WIDE, SQUARE, LOW = (f"model.layers.0.{place}.weight" for place in PLACES)
CONFIG = {"model_type": "llama"}
NEEDED = {"rtol": 1e-3}


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of a test's size are read twice, in several chunks."""
    monkeypatch.setattr(rereading, "SMALLEST", 32)
    for module in ("deltas", "reader", "kernels.regions", "writing"):
        monkeypatch.setattr(f"actmat.engine.{module}.CHUNK", 1024)


@pytest.fixture(scope="module")
def models() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A base and three experts whose deltas fall off, so that a cut-off removes something."""
    rng = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    base = {
        TALL: gaussian(130, 40),
        WIDE: gaussian(36, 80),
        SQUARE: gaussian(40, 40),
        LOW: gaussian(12, 40),
        "norm.weight": gaussian(40),
    }

    def expert() -> dict[str, Tensor]:
        falling = {n: 0.8 ** torch.arange(t.shape[-1]) for n, t in base.items() if t.dim() == 2}
        return {n: t + 0.1 * gaussian(*t.shape) * falling.get(n, torch.tensor(1.0)) for n, t in base.items()}

    return base, [expert() for _ in range(3)]


def merged(
    models: tuple[dict[str, Tensor], list[dict[str, Tensor]]], out: Path, *variants: Mapping[str, Any], workers: int = 1
) -> tuple[list[dict[str, Tensor]], list[CountingCheckpoint]]:
    """Outputs by variant, and the counting inputs."""
    base, experts = models
    opened = [counted(base, CONFIG), *(counted(e, CONFIG) for e in experts)]
    return merge_open(opened[0], opened[1:], out, variants or [{"options": NEEDED}], workers=workers), opened


def test_what_is_read_twice_is_known_before(models, tmp_path: Path) -> None:
    """The dual form, smaller than its matrix, needs one reading."""
    (found,), (base, *experts) = merged(models, tmp_path)
    method = get_method("actmat")
    options = method.resolve_options(NEEDED)
    for name, tensor in models[0].items():
        times = 2 if tensor.dim() == 2 and method.reads_again(tensor.shape, 3, options) else 1
        assert times == (2 if name in (TALL, WIDE, SQUARE) else 1)
        assert base.bytes_read[name] == tensor.nbytes
        assert {e.bytes_read[name] for e in experts} == {times * tensor.nbytes}
        if tensor.dim() == 2:
            deltas = [(e[name] - tensor).double() for e in models[1]]
            expected = method.merge(deltas, **options).value
            assert relative_error((found[name] - tensor).double(), expected) < F32_SOLVE


def test_variants_are_read_once_and_have_the_bytes_of_merges_alone(models, tmp_path: Path) -> None:
    variants: list = [{"options": {"rtol": r}} for r in (1e-6, 1e-3, 1e-2)]
    variants += [{"options": {"trim": 0.5}}, {"method": "actmat_ridge"}]
    together, (_, *experts) = merged(models, tmp_path / "together", *variants, workers=2)
    assert [e.read_other_than_once() for e in experts] == [{}] * 3
    for k, (variant, found) in enumerate(zip(variants, together, strict=True)):
        (alone,), _ = merged(models, tmp_path / str(k), variant)
        assert all(torch.equal(alone[n], found[n]) for n in alone), variant


@pytest.mark.parametrize("pool", [(), ("*.{up,q}_proj.weight",)], ids=["apart", "pooled"])
def test_any_number_of_workers_gives_the_same_bytes(models, pool, tmp_path: Path, monkeypatch) -> None:
    for name, value in {"SPLIT_ENTRIES": 1, "PANEL_ROWS": 16, "GRAM_COLUMNS": 8, "PANELLED_FROM": 16}.items():
        monkeypatch.setattr(panels, name, value)
    monkeypatch.setattr("actmat.linalg.interference.spectral_solve.PANEL_ROWS", 16)
    outputs = []
    for workers in (1, 2, 4):
        (found,), (_, *experts) = merged(
            models, tmp_path / str(workers), {"options": NEEDED, "pool": pool}, workers=workers
        )
        assert {e.bytes_read[TALL] / e.specs[TALL].nbytes for e in experts} == {2.0}
        outputs.append(found)
    for one, other in itertools.pairwise(outputs):
        assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("pool", [(), ("*.{up,q}_proj.weight",)], ids=["apart", "pooled"])
def test_what_is_costly_to_read_is_held_and_gives_the_same_bytes(models, pool, tmp_path: Path, monkeypatch) -> None:
    """As deltas of remote experts are, whose bytes would be sent again."""
    variant = {"options": NEEDED, "pool": pool}
    (near,), _ = merged(models, tmp_path / "near", variant)
    monkeypatch.setattr(CountingCheckpoint, "buffer_bytes", 1)
    (far,), (_, *experts) = merged(models, tmp_path / "far", variant)
    assert [e.read_other_than_once() for e in experts] == [{}] * 3
    assert all(torch.equal(near[n], far[n]) for n in near)


def test_values_that_are_not_finite_are_left_out_both_times(models, tmp_path: Path) -> None:
    base, experts = models
    bad, mended = dict(experts[1]), dict(experts[1])
    for name in (TALL, WIDE):
        bad[name], mended[name] = experts[1][name].clone(), experts[1][name].clone()
        bad[name][3, 5], mended[name][3, 5] = torch.nan, base[name][3, 5]
    variant = {"options": NEEDED, "allow_nonfinite": True}
    found, expected = (
        merged((base, [experts[0], e, experts[2]]), tmp_path / n, variant)[0][0]
        for n, e in (("bad", bad), ("as", mended))
    )
    assert all(torch.equal(found[n], expected[n]) for n in found)
