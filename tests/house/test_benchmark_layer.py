"""The benchmark of one layer: its inputs are merged by the command as by the formula that it is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.layer import EXPERTS, formula, make_inputs
from benchmarks.make_llama import Size
from benchmarks.matrix import naive_actmat
from safetensors.torch import load_file
from tests.tolerances import F32_SOLVE

import actmat


def test_the_inputs_are_made_once_and_merge_as_the_formula_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = Size(hidden=32, intermediate=48, layers=1, heads=4, key_value_heads=2, vocabulary=64)
    base, experts = make_inputs(tmp_path, size)
    assert len(experts) == EXPERTS
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert make_inputs(tmp_path, size) == (base, experts)
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}

    seen = []
    monkeypatch.setattr("benchmarks.layer.naive_actmat", lambda deltas: seen.append(deltas) or naive_actmat(deltas))
    formula(base, experts)
    old = load_file(base / "model.safetensors")
    assert [d[0].shape for d in seen] == [t.shape for t in old.values()]
    assert all("embed" not in name and tensor.ndim == 2 for name, tensor in old.items())

    actmat.merge(base, experts, out=tmp_path / "out", method="actmat", threads=1, durable=False, dtype="float32")
    new = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    deltas = next(d for d, n in zip(seen, old, strict=True) if n == name)
    expected = naive_actmat([d.double() for d in deltas])
    found = new[name].double() - old[name].double()
    assert float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected)) < F32_SOLVE
