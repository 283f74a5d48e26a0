"""The matrix of architecture families: a sample of it here, the whole by `pytest -m slow`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.common import read_result
from benchmarks.families.__main__ import renewed
from benchmarks.families.check import check
from benchmarks.families.splits import observed_pieces
from benchmarks.families.tiny import Architecture, architectures, build, shrunk
from torch import Tensor, nn

from actmat.checkpoints.base import TensorSpec
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import Role

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
    rows = read_result("families")["rows"]
    done = [r for r in rows if r["stage"] in ("ran", "loaded")]
    assert len(done) >= 150
    assert [r["class"] for r in rows if r["stage"] == "merged"] == []
    assert [r["class"] for r in done if r.get("wrong")] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some 800 models are made and merged
def test_every_class_that_can_be_built() -> None:
    """Every class of both libraries; a test of its own, as listing them takes the import of both."""
    failed = []
    for architecture in architectures():
        row = check(architecture)
        why = str(row.get("why"))  # two parameters, whatever the config says; a list that grows with every load
        refused = "config.json ties and that differ" in why or "what the model computes differ: down_ops" in why
        if (row["stage"] in ("merged", "failed") and not refused) or row.get("wrong"):
            failed.append(row)
    assert failed == []


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("transformers", "BrosModel"),
        ("transformers", "ClvpModelForConditionalGeneration"),
        ("transformers", "EvollaForProteinText2Text"),
        ("diffusers", "StableAudio3DiTModel"),
    ],
)
def test_frequencies_that_a_model_computes_are_buffers(library: str, name: str) -> None:
    """No trained tensor is one, so that copying the base's loses nothing."""
    model = build(next(a for a in architectures() if (a.library, a.name) == (library, name)))
    specs = {n: TensorSpec(n, tuple(t.shape), str(t.dtype)[6:], "") for n, t in model.state_dict().items()}
    layouts = resolve_layout(specs, None).tensors
    copied = {n for n, layout in layouts.items() if layout.role is Role.BUFFER}
    assert any("inv_freq" in n for n in copied)
    assert copied == specs.keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
