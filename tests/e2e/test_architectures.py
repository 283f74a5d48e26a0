"""Merges of tiny models of many architectures load, run, and are what a naive float64 loop gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.families.__main__ import renewed
from benchmarks.families.check import check
from benchmarks.families.splits import observed_pieces
from benchmarks.families.tiny import Architecture, architectures, shrunk
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
def test_tied_weights_stay_tied(name: str, merges: dict[tuple[str, str], Any]) -> None:
    model = load(BY_NAME[name], merges[name, "actmat"].out)
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == table.data_ptr()


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


# The matrix of architecture families: a sample of it here, the whole by `pytest -m slow`.


RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "families.json"
SAMPLE = [
    ("transformers", name)
    for name in ("GPT2LMHeadModel", "MambaForCausalLM", "Qwen3NextForCausalLM", "DeepseekV4ForCausalLM")
]
SAMPLE += [("diffusers", name) for name in ("Flux2Transformer2DModel", "DiTTransformer2DModel")]


class Packed(nn.Module):
    """Three maps in thirds, two per head, one that is only turned."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.heads, self.plain = nn.Linear(4, 12), nn.Linear(4, 16), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 3, 4).unbind(1)
        gate, up = self.heads(x).view(2, 4, 4).chunk(2, dim=-1)
        plain = self.plain(x).view(2, 2, 4).transpose(0, 1)
        rotary = torch.cat([-plain[..., 2:], plain[..., :2]], dim=-1)
        return (q * k + v).sum() + (gate * up).sum() + rotary.sum()


def test_splits_are_seen_through_views() -> None:
    model = Packed()
    pieces = observed_pieces(model, lambda: model(torch.ones(2, 4)))
    assert pieces.keys() == {"qkv.weight", "heads.weight"}
    assert sorted(pieces["qkv.weight"]) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert sorted(pieces["heads.weight"]) == [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]


def test_sizes_are_made_small_by_name() -> None:
    config = {"hidden_size": 4096, "num_hidden_layers": 40, "rope_theta": 10000, "layer_types": ["a"] * 9 + ["b"]}
    found = shrunk(config)
    assert found == {"hidden_size": 32, "num_hidden_layers": 2, "rope_theta": 10000, "layer_types": ["a", "b"]}


@pytest.mark.parametrize(("library", "name"), SAMPLE)
def test_a_sample_is_merged_loaded_and_run(library: str, name: str) -> None:
    row = check(Architecture(library, name))
    assert row["stage"] == "ran", row
    assert row["changed"]
    assert row["wrong"] == []
    assert row["missed"] == []
    assert row["agree"] == row["packed"]


def test_rows_are_renewed_and_the_others_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{"library": "transformers", "class": name, "stage": "none"} for name in ("A", "B")]
    (tmp_path / "families.json").write_text(json.dumps({"command": "all", "renewed": ["A"], "rows": rows}))
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    renewed({("transformers", "B"): rows[1] | {"stage": "ran"}})
    found = json.loads((tmp_path / "families.json").read_text())
    assert (found["command"], found["renewed"]) == ("all", ["A", "B"])
    assert [r["stage"] for r in found["rows"]] == ["none", "ran"]


def test_the_recorded_matrix_has_no_failure_of_ours() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    done = [r for r in rows if r["stage"] in ("ran", "loaded")]
    assert len(done) >= 150
    assert [r["class"] for r in rows if r["stage"] == "merged"] == []
    assert [r["class"] for r in done if r.get("wrong")] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some 800 models are made and merged
def test_every_class_that_can_be_built() -> None:
    """Every class of both libraries; a test of its own, as listing them takes the import of both."""
    failed = []
    for one in architectures():
        row = check(one)
        refused = "config.json ties and that differ" in str(row.get("why"))  # two parameters, whatever the config says
        if (row["stage"] in ("merged", "failed") and not refused) or row.get("wrong"):
            failed.append(row)
    assert failed == []
