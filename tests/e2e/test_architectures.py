"""Merges of tiny models of many architectures load, run, and are what a naive float64 loop gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.merging import loaded_whole
from tests.helpers.models import (
    BY_NAME,
    CASES,
    Case,
    Views,
    linear,
    naive_merge,
    perturbed,
    save_family,
    stored,
    thirds,
)
from tests.tolerances import F32_FORWARD, F32_SOLVE, relative_error
from torch import Tensor, nn

import actmat

# Merge tiny models of many architectures; the result loads, runs, and is what a naive float64 loop gives.


Family = tuple[Path, list[Path]]
METHODS = ("actmat", "average")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    """Base and experts of every case, made once."""
    return {case.name: save_family(case, tmp_path_factory.mktemp(case.name)) for case in CASES}


@pytest.fixture(scope="module")
def merges(families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Report of every case and method."""
    out = tmp_path_factory.mktemp("merged")
    return {
        (name, method): actmat.merge(
            base, experts, method=method, out=out / f"{name}-{method}", threads=1, durable=False
        )
        for name, (base, experts) in families.items()
        for method in METHODS
    }


def load(case: Case, folder: Path) -> nn.Module:
    return loaded_whole(case.loader, folder, dtype=torch.float32).eval()


def expected(case: Case, family: Family, method: str) -> dict[str, Tensor]:
    base, experts = family
    return naive_merge(stored(base), [stored(e) for e in experts], case.views, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_weights_are_those_of_the_naive_loop(
    case: Case, method: str, families: dict[str, Family], merges: dict[tuple[str, str], Any]
) -> None:
    wanted = expected(case, families[case.name], method)
    found = stored(merges[case.name, method].out)
    assert found.keys() == wanted.keys()
    errors = {n: relative_error(found[n], wanted[n]) for n in wanted}
    assert {n: e for n, e in errors.items() if e > F32_SOLVE} == {}
    start = stored(families[case.name][0])
    assert {n: found[n].dtype for n in found} == {n: start[n].dtype for n in start}
    assert all(torch.equal(found[n], start[n]) for n in start if not start[n].is_floating_point())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_it_loads_and_runs(
    case: Case, method: str, families: dict[str, Family], merges: dict[tuple[str, str], Any], tmp_path: Path
) -> None:
    out = merges[case.name, method].out
    logits = case.output(load(case, out))
    assert torch.isfinite(logits).all()
    naive = {
        n: t.float() if t.is_floating_point() else t for n, t in expected(case, families[case.name], method).items()
    }
    save_file(naive, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((out / "config.json").read_bytes())
    assert relative_error(logits, case.output(load(case, tmp_path))) < F32_FORWARD
    before = case.output(load(case, families[case.name][0]))
    assert relative_error(logits, before) > 5 * F32_FORWARD, "the merge did not change the model: nothing was tested"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_plan_accounts_for_every_tensor(
    case: Case, families: dict[str, Family], merges: dict[tuple[str, str], Any]
) -> None:
    report = merges[case.name, "actmat"]
    planned = {t.name: t for t in report.plan.items}
    start = stored(families[case.name][0])
    assert planned.keys() == start.keys()
    assert all(t.reason.strip() for t in planned.values())
    for name, tensor in start.items():
        matrix = case.views(name) is not None
        wanted = "merge" if matrix else "average" if tensor.is_floating_point() else "copy"
        assert planned[name].action == wanted, f"{name}: {planned[name].reason}"
    rows = json.loads((report.out / "actmat_manifest.json").read_text())["tensors"]
    assert {r["name"] for r in rows} == start.keys()
    assert report.plan.family == json.loads((families[case.name][0] / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_both_names_of_a_tied_tensor_get_the_same_bytes(
    name: str, families: dict[str, Family], merges: dict[tuple[str, str], Any], tmp_path: Path
) -> None:
    """A torch file stores a tied parameter under all of its names; experts store one. Merged once, written to all."""
    case = BY_NAME[name]
    base, experts = families[name]
    model = load(case, base)
    both = tmp_path / "base"
    both.mkdir()
    (both / "config.json").write_bytes((base / "config.json").read_bytes())
    torch.save(model.state_dict(), both / "pytorch_model.bin")
    report = actmat.merge(both, experts, method="actmat", out=tmp_path / "out", threads=1, durable=False)
    found = stored(report.out)
    once = stored(merges[name, "actmat"].out)
    assert found.keys() == model.state_dict().keys()
    assert len(found) > len(once)
    assert all(torch.equal(found[n], once[n]) for n in once)
    ties = {t.name: t.tied_to for t in report.plan.items if t.action == "tie"}
    assert ties.keys() == found.keys() - once.keys()
    assert all(torch.equal(found[a], found[str(c)]) for a, c in ties.items())
    loaded = load(case, report.out)
    assert loaded.get_output_embeddings().weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()


def encoder_views(name: str) -> Views | None:
    if name.endswith("in_proj_weight"):
        return thirds
    return linear if name.endswith(("out_proj.weight", "linear1.weight", "linear2.weight")) else None


def test_a_plain_torch_module(tmp_path: Path) -> None:
    """`nn.TransformerEncoder`: packed projections, bare files of two formats, no config at all."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    start = {k: v.clone() for k, v in encoder.state_dict().items()}
    torch.save(start, tmp_path / "base.pt")
    first, second = perturbed(start, 1), perturbed(start, 2)
    torch.save(first, tmp_path / "first.pt")
    save_file(second, tmp_path / "second.safetensors")
    places = [tmp_path / "first.pt", tmp_path / "second.safetensors"]
    report = actmat.merge(tmp_path / "base.pt", places, method="actmat", out=tmp_path / "out", threads=1, durable=False)
    found = load_file(report.out / "model.safetensors")
    wanted = naive_merge(start, [first, second], encoder_views, method="actmat")
    assert found.keys() == start.keys()
    assert max(relative_error(found[n], wanted[n]) for n in wanted) < F32_SOLVE
    assert report.plan.family is None
    packed = next(t for t in report.plan.items if t.name.endswith("in_proj_weight"))
    assert [b.name for b in packed.layout.blocks] == ["q", "k", "v"]
    encoder.load_state_dict(found)
    assert torch.isfinite(encoder(torch.randn(2, 5, 32))).all()
