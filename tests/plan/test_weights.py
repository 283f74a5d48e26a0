"""A weight means the same on every tensor: each method's elementwise counterpart against its formula in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tolerances import F32_ELEMENTWISE

import actmat
from actmat.methods import all_methods

SHAPES = {"embed.weight": (12, 8), "norm.weight": (8,), "conv.weight": (6, 4, 3, 3), "head.bias": (12,)}
"""Tensors that no method for matrices acts on."""
SIGNS: tuple[list[float], ...] = ([1, -0.9], [-1, 0.25], [0.8, 0.6], [0, 0.5], [1, 1], [0, 0])

COEFFICIENTS: dict[str, tuple[dict[str, Any], Any]] = {
    "task_arithmetic": ({"scaling": 0.7}, lambda w: [0.7 * x for x in w]),
    "linear": ({}, "mean"),
    "average": ({}, "mean"),
    "ties": ({}, "mean"),
    "ties sum": ({"reduce": "sum"}, lambda w: w),
    "dare": ({"scaling": 0.7}, lambda w: [0.7 * x for x in w]),
    "dare linear": ({"rule": "linear"}, lambda w: w),
    "dare average": ({"rule": "average"}, "mean"),
    "dare ties": ({"rule": "ties"}, "mean"),
    "dare ties sum": ({"rule": "ties", "reduce": "sum"}, lambda w: w),
    "breadcrumbs": ({"scaling": 0.5}, lambda w: [0.5 * x for x in w]),
    "breadcrumbs mean": ({"sign_election": True, "reduce": "mean"}, "mean"),
    "della": ({}, "mean"),
    "della sum": ({"reduce": "sum"}, lambda w: w),
    "della linear": ({"sign_election": False}, lambda w: w),
    "tsv": ({}, lambda w: [x / 2 for x in w]),
    "iso_c": ({}, lambda w: [x / 2 for x in w]),
    "iso_cts": ({}, lambda w: [x / 2 for x in w]),
    "karcher": ({}, "mean"),
    "nuslerp": ({}, "mean"),
    "actmat": ({}, "mean"),
    "actmat_ridge": ({}, "mean"),
    "wudi": ({}, "mean"),
    "swudi": ({}, "mean"),
    "aswudi": ({}, "mean"),
}
"""Method and options -> factors of the deltas outside of its matrices, of the weights."""


def test_every_method_with_weights_is_in_the_table() -> None:
    weighted = {m.name for m in all_methods() if m.is_weighted and not m.needs_statistics}
    assert {name.split()[0] for name in COEFFICIENTS} == weighted


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A base and two experts without a matrix, and the float64 deltas."""
    folder, rng = tmp_path_factory.mktemp("weights"), torch.Generator().manual_seed(0)
    tensors = [{n: torch.randn(s, generator=rng) for n, s in SHAPES.items()} for _ in range(3)]
    for name, found in zip(("base", "one", "two"), tensors, strict=True):
        save_file(found, folder / f"{name}.safetensors")
    base, *experts = tensors
    deltas = {n: torch.stack([e[n].double() - base[n].double() for e in experts]) for n in SHAPES}
    return {"base": base, "deltas": deltas, "folder": folder}


def factors(rule: Any, weights: list[float]) -> list[float]:
    if rule != "mean":
        return list(rule(weights))
    return [w / sum(weights) for w in weights] if any(weights) else [0.0 for _ in weights]


def merged(trained: dict[str, Any], method: str, out: Path, weights: Any = None, **fields: Any) -> dict[str, Any]:
    folder = trained["folder"]
    experts = [folder / f"{n}.safetensors" for n in ("one", "two")[: len(weights or (1, 1))]]
    fields = {"durable": False, **fields}
    found = actmat.merge(folder / "base.safetensors", experts, out=out, method=method, weights=weights, **fields)
    files = [out] if out.is_file() else list(out.glob("*.safetensors"))
    return {"report": found} | load_file(files[0])


@pytest.mark.parametrize("case", COEFFICIENTS)
def test_weights_outside_of_matrices_are_those_of_the_method(
    case: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    options, rule = COEFFICIENTS[case]
    by_name = case in ("average", "linear", "karcher")
    for k, weights in enumerate(SIGNS):
        if by_name and not any(weights):
            continue  # the mean of no expert was asked for by name
        found = merged(trained, case.split()[0], tmp_path / str(k), list(weights), options=options)
        for name, base in trained["base"].items():
            want = torch.einsum("t...,t->...", trained["deltas"][name], torch.tensor(factors(rule, weights)).double())
            error = (found[name].double() - base.double() - want).norm() / trained["deltas"][name].norm()
            assert error < F32_ELEMENTWISE, (weights, name)
        warned = [n for n in found["report"].plan.notes if "divides the weights" in n.text]
        assert bool(warned) == (rule == "mean" and min(weights) < 0)


@pytest.mark.parametrize("t", [0.1, 0.5, -0.25])
def test_the_position_of_slerp_is_obeyed_everywhere(t: float, trained: dict[str, Any], tmp_path: Path) -> None:
    for weights, shares in (([1, 1], [1 - t, t]), ([1], [t])):
        found = merged(trained, "slerp", tmp_path / str(len(weights)), weights, options={"t": t})
        for name, base in trained["base"].items():
            deltas = trained["deltas"][name][: len(shares)]
            want = torch.einsum("t...,t->...", deltas, torch.tensor(shares).double())
            assert (found[name].double() - base.double() - want).norm() < F32_ELEMENTWISE * deltas.norm()


def test_unnormalized_linear_scales_the_base_everywhere(trained: dict[str, Any], tmp_path: Path) -> None:
    found = merged(trained, "linear", tmp_path / "out", [0.8, -0.5], options={"normalize": False})
    for name, base in trained["base"].items():
        one, two = base.double() + trained["deltas"][name]
        want = 0.8 * one - 0.5 * two
        assert (found[name].double() - want).norm() < F32_ELEMENTWISE * want.norm()
