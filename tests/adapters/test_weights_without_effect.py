"""Weights that cannot matter are said to have no effect, in the plan, the summary and the manifest; others are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tests.helpers.adapters import LLAMA, save_peft, tiny
from tests.tolerances import F32_ELEMENTWISE, F32_SOLVE
from torch import Tensor

import actmat

UNEQUAL = [1.0, 0.5, 0.1]
SAID = "the weights have no effect in"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of rank 2 and three of rank 6, for layers of 16 and 24 inputs."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny("llama").float().save_pretrained(folder / "base")
    for rank in (2, 6):
        config = LoraConfig(**{**LLAMA, "r": rank})
        for t in range(3):
            save_peft(folder / f"rank{rank}" / f"{t}", "llama", t, config, dtype=torch.float32)
    return folder


def merged(
    place: Path, out: Path, weights: list[float], *, rank: int = 2, **fields: Any
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    base = place / "base" if fields["to"] == "model" else None
    experts = [place / f"rank{rank}" / f"{t}" for t in range(3)]
    report = actmat.merge(base, experts, weights=weights, out=out, durable=False, **fields)
    said = tuple(n for n in map(str, report.plan.notes) if n.startswith(SAID))
    assert [n["text"] for n in report.manifest["notes"] if n["text"].startswith(SAID)] == list(said)
    return load_file(next(out.glob("*.safetensors"))), said


@pytest.mark.parametrize("to", ["adapter", "model"])
@pytest.mark.parametrize("method", ["actmat", "wudi"])
def test_where_it_is_said_the_bytes_are_equal(place: Path, tmp_path: Path, method: str, to: str) -> None:
    alike, silent = merged(place, tmp_path / "a", [1.0, 1.0, 1.0], method=method, to=to)
    weighted, said = merged(place, tmp_path / "b", UNEQUAL, method=method, to=to)
    assert silent == (), "no weights that differ, nothing to say"
    assert len(said) == 1
    assert said[0].startswith(f"{SAID} 6 of 6 tensors")
    assert said[0].endswith("linear, task_arithmetic, ties")
    assert all(torch.equal(alike[name], weighted[name]) for name in alike)


OBEYED = [
    *((m, {}, UNEQUAL) for m in ("linear", "task_arithmetic", "ties", "average", "actmat_ridge", "swudi", "tsv")),
    *(("actmat", options, UNEQUAL) for options in ({"trim": 0.5}, {"filter": "tikhonov"}, {"filter": "adaptive"})),
    ("actmat", {}, [1.0, 0.5, 0.0]),
]  # fmt: skip


@pytest.mark.parametrize("to", ["adapter", "model"])
@pytest.mark.parametrize(("method", "options", "weights"), OBEYED, ids=str)
def test_where_weights_matter_nothing_is_said(
    place: Path, tmp_path: Path, method: str, options: dict[str, Any], weights: list[float], to: str
) -> None:
    alike, _ = merged(place, tmp_path / "a", [1.0, 1.0, 1.0], method=method, options=options, to=to)
    weighted, said = merged(place, tmp_path / "b", weights, method=method, options=options, to=to)
    assert said == ()
    assert sum(not torch.equal(alike[n], weighted[n]) for n in alike) >= 6


@pytest.mark.parametrize("to", ["adapter", "model"])
def test_ranks_that_fill_the_inputs_say_nothing(place: Path, tmp_path: Path, to: str) -> None:
    """18 directions are more than 16 inputs, and fewer than the 24 of the down projections."""
    alike, _ = merged(place, tmp_path / "a", [1.0, 1.0, 1.0], rank=6, method="actmat", to=to)
    weighted, said = merged(place, tmp_path / "b", UNEQUAL, rank=6, method="actmat", to=to)
    assert said[0].startswith(f"{SAID} 2 of 6 tensors")
    changed = {n for n in alike if not torch.allclose(alike[n], weighted[n], rtol=F32_SOLVE, atol=F32_ELEMENTWISE)}
    assert changed
    assert not any("down_proj" in name for name in changed)
