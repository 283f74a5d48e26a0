"""What the fields of a recipe do, pools included, on cases small enough to work out by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.models import naive_actmat
from tests.helpers.open_merges import merge_tensors, output
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT, F32_SOLVE, relative_error
from torch import Tensor

import actmat
from actmat.planning import regions

# What the fields of a recipe do, on cases small enough to work out by hand.


O_PROJ, UP, NORM = "layers.{}.self_attn.o_proj.weight", "layers.{}.mlp.up_proj.weight", "layers.{}.norm.weight"


def base_tensors(layers: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    out = {"embed_tokens.weight": torch.randn(11, 6, generator=generator)}
    for n in range(layers):
        out[O_PROJ.format(n)] = torch.randn(6, 6, generator=generator)
        out[UP.format(n)] = torch.randn(9, 6, generator=generator)
        out[NORM.format(n)] = torch.randn(6, generator=generator)
    out["lm_head.weight"] = torch.randn(11, 6, generator=generator)
    return out


BASE = base_tensors()


def expert(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + torch.randn(t.shape, generator=generator) for n, t in BASE.items()}


EXPERTS = [expert(10), expert(11)]


def delta(tensors: dict[str, Tensor], name: str) -> Tensor:
    return tensors[name].double() - BASE[name].double()


def deltas(name: str) -> list[Tensor]:
    return [delta(e, name) for e in EXPERTS]


def merged(tmp_path: Path, **fields: Any) -> tuple[dict[str, Tensor], actmat.MergeReport]:
    """Merged deltas, and the report."""
    report = merge_tensors(BASE, EXPERTS, tmp_path, **{"dtype": "float64", **fields})
    found = output(report)
    return {n: found[n] - BASE[n].double() for n in found}, report


def close(found: Tensor, wanted: Tensor, bound: float = F32_PRODUCT) -> bool:
    return relative_error(found, wanted) < bound


def actions(report: actmat.MergeReport) -> dict[str, str]:
    return {t.name: t.action for t in report.plan.items}


def test_scale_is_for_the_method_alone(tmp_path: Path) -> None:
    """A sum is one of every tensor; where `actmat` does not act, the mean keeps its size."""
    found, _ = merged(tmp_path / "sum", method="task_arithmetic", options={"scaling": 1.0}, scale=0.25)
    for name in BASE:
        assert close(found[name], sum(deltas(name)) / 4, F32_ELEMENTWISE), name
    found, _ = merged(tmp_path / "mean", method="actmat", scale=0.25)
    assert close(found[UP.format(0)], naive_actmat(deltas(UP.format(0))) / 4, F32_SOLVE)
    assert close(found[NORM.format(0)], sum(deltas(NORM.format(0))) / 2, F32_ELEMENTWISE)


def test_keep_copies_the_base(tmp_path: Path) -> None:
    found, report = merged(tmp_path, keep=["lm_head.*", "layers.1.*"])
    kept = {n for n in BASE if n.startswith(("lm_head", "layers.1."))}
    assert {n for n, a in actions(report).items() if a == "copy"} == kept
    assert all(bool((found[n] == 0).all()) == (n in kept) for n in BASE)
    reasons = {t.name: t.reason for t in report.plan.items}
    assert "lm_head.*" in reasons["lm_head.weight"]


def test_rule_options_add_to_those_of_the_same_method(tmp_path: Path) -> None:
    rules = [{"match": "layers.1.*_proj.*", "options": {"rtol": 0.5}}]
    _, report = merged(tmp_path, options={"power": 0.5}, rules=rules)
    calls = {t.name: t.call for t in report.plan.items}
    inside, outside = calls[UP.format(1)], calls[UP.format(0)]
    assert (inside.options["rtol"], inside.options["power"]) == (0.5, 0.5)
    assert (outside.options["rtol"], outside.options["power"]) == (None, 0.5)


def test_roles_overrule_names_and_shapes(tmp_path: Path) -> None:
    name = UP.format(0)
    roles: list[dict[str, Any]] = [
        {"match": name, "orientation": "IO"},
        {"match": UP.format(1), "blocks": {"a": [0, 4], "b": [4, 9]}},
        {"match": O_PROJ.format(0), "role": "vector"},
        {"match": "embed_tokens.weight", "role": "linear"},
    ]
    found, _ = merged(tmp_path, roles=roles)
    assert close(found[name], naive_actmat([d.T for d in deltas(name)]).T, F32_SOLVE)
    blocks = [naive_actmat([d[rows] for d in deltas(UP.format(1))]) for rows in (slice(0, 4), slice(4, 9))]
    assert close(found[UP.format(1)], torch.cat(blocks), F32_SOLVE)
    assert close(found[O_PROJ.format(0)], sum(deltas(O_PROJ.format(0))) / 2)
    assert close(found["embed_tokens.weight"], naive_actmat(deltas("embed_tokens.weight")), F32_SOLVE)
    assert not close(found[name], naive_actmat(deltas(name)), 0.01), "orientation must matter here"


def test_steps_measure_each_matrix_of_a_packed_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "CHUNK", 16)  # an elementwise method would otherwise be given pieces of a matrix
    name, other = UP.format(1), UP.format(2)
    settings: dict[str, Any] = {"post": "mean_norm", "roles": [{"match": other, "blocks": {"a": [0, 4], "b": [4, 9]}}]}
    found, _ = merged(tmp_path, method="task_arithmetic", options={"scaling": 4.0}, **settings)
    for tensor, rows in ((name, slice(0, 9)), (other, slice(0, 4)), (other, slice(4, 9))):
        mean = float(sum(torch.linalg.norm(d[rows]) for d in deltas(tensor))) / 2
        assert float(torch.linalg.norm(found[tensor][rows])) == pytest.approx(mean, rel=F32_PRODUCT)


def test_seed_matters_to_random_rules_only(tmp_path: Path) -> None:
    drawn = [merged(tmp_path / f"dare{s}", method="dare", seed=s, options={"density": 0.5})[0] for s in (0, 1)]
    assert not torch.equal(drawn[0][UP.format(0)], drawn[1][UP.format(0)])
    plain = [merged(tmp_path / f"actmat{s}", seed=s)[0] for s in (0, 1)]
    assert all(torch.equal(plain[0][n], plain[1][n]) for n in BASE)
    mask = (drawn[0][UP.format(0)] != 0).tolist()
    assert mask != (drawn[0][UP.format(1)] != 0).tolist(), "every tensor has a generator of its own"
