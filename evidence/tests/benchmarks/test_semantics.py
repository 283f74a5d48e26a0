"""The matrix against PEFT: a sample of it with the installed PEFT here, the whole in benchmarks/semantics."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.common import RESULTS
from benchmarks.semantics import tables
from benchmarks.semantics.compare import Cell, compare
from benchmarks.semantics.families import FAMILIES
from benchmarks.semantics.options import OPTIONS, cases
from benchmarks.semantics.worker import Worker
from safetensors.torch import load_file, save_file

import actmat

SAMPLE = [
    ("llama", "rank_pattern, alpha_pattern, use_rslora"),
    ("gpt2, tied", "use_dora, fan_in_fan_out"),
    ("gpt2, tied", "(IA)^3, fan_in_fan_out"),
    ("phi3, packed", "init_lora_weights=pissa"),
    ("bloom, packed, tied", "lora_bias"),
    ("qwen2, tied", "modules_to_save=head"),
    ("gpt2, tied", "modules_to_save=table, ensure_weight_tying"),
    ("gpt_neox, packed", "modules_to_save=head"),
    ("t5, tied", "trained tokens"),
    ("gpt_oss, transposed stacks", "target_parameters"),
    ("olmoe, square stacks", "target_parameters, patterns"),
    ("qwen2_vl", "convolutions"),
    ("bert, tied", "bias=all"),
]
FIXES = re.compile(r"\b(Fix|Fold|fold|merge|say it|Load it|Give|give|leave|save)\b")
"""What an error that says what to do has one of."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(tmp_path_factory.mktemp("semantics"))


def made(worker: Worker, family: str, option: str) -> tuple[Path, Path]:
    """The base and the folder of a case that PEFT makes."""
    name = f"case{len(list(worker.folder.iterdir()))}"
    assert worker.answer(family, option, name) is None
    return worker.folder / family / OPTIONS[option].dtype, worker.folder / name


@pytest.mark.parametrize(("family", "option"), SAMPLE)
def test_a_sample_is_what_peft_merges(worker: Worker, family: str, option: str) -> None:
    cell = compare(*made(worker, family, option), OPTIONS[option].bound)
    assert cell.outcome == "exact", cell
    assert cell.changed > 0


def test_a_delta_of_a_tied_head_is_refused(worker: Worker) -> None:
    cell = compare(*made(worker, "qwen2, tied", "LoRA on the head"), 1e-12)
    assert cell.outcome == "refused"
    assert "it has a delta for 'lm_head.weight', which the base (BASE) ties" in cell.why


def test_what_differs_is_a_failure(worker: Worker) -> None:
    base, case = made(worker, "llama", "plain")
    path = case / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 6 + 1e-9}))
    cell = compare(base, case, 1e-12)
    assert cell.outcome == "FAILURE"
    assert 0 < cell.error < 1e-9
    file = case / "merged" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"more": torch.ones(1)}, file)
    assert compare(base, case / "again", 1e-12).outcome == "refused"
    (case / "out").rename(case / "old")
    assert compare(base, case, 1e-12) == Cell("FAILURE", "tensors of one side only: more")


def test_an_architecture_in_the_config_of_the_text_is_read(worker: Worker) -> None:
    """Transformers 4 writes it there for Qwen2-VL, whose tensors have other names in memory than on disk."""
    base, case = made(worker, "qwen2_vl", "plain")
    path = base / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["architectures"] = config.pop("architectures")
    path.write_text(json.dumps(config))
    assert compare(base, case, 1e-12).outcome == "exact"
    config["text_config"]["architectures"] = ["Qwen2ForCausalLM"]
    path.write_text(json.dumps(config))
    assert compare(base, case, 1e-12).outcome == "exact", "names fit by the prefix of a multimodal model"


def test_biases_that_peft_did_not_save_are_noted(worker: Worker) -> None:
    base, case = made(worker, "qwen2, tied", "bias=lora_only")
    file = case / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    kept = {n: t for n, t in tensors.items() if not n.endswith(".bias")}
    assert kept.keys() < tensors.keys()
    for stored, count in ((tensors, 0), (kept, 1)):
        save_file(stored, file)
        plan = actmat.plan(base, [case / "adapter"], method="linear")
        assert sum("its file has none of the 4 biases" in note for note in map(str, plan.notes)) == count


def test_oft_of_peft_before_0_18_has_another_series(worker: Worker) -> None:
    """Its config has no version; the last power of the series counts twice there."""
    base, case = made(worker, "llama", "OFT, Cayley-Neumann")
    path = case / "adapter" / "adapter_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"peft_version": None}))
    cell = compare(base, case, 1e-12)
    assert cell.outcome == "FAILURE"
    assert 1e-6 < cell.error < 1e-3
    name = "model.layers.0.self_attn.q_proj"
    vectors = load_file(case / "adapter" / "adapter_model.safetensors")[f"base_model.model.{name}.oft_R.weight"]
    skew = torch.zeros(4, 4, 4, dtype=torch.float64)
    skew[:, *torch.triu_indices(4, 4, 1)] = vectors
    skew = skew - skew.mT
    series = torch.eye(4) + 2 * sum(torch.linalg.matrix_power(skew, k) for k in (1, 2, 3, 4))
    before, after = (load_file(p / "model.safetensors")[f"{name}.weight"] for p in (base, case / "out"))
    torch.testing.assert_close(after, before @ torch.block_diag(*series).mT, rtol=1e-12, atol=1e-12)


def test_peft_refuses_in_a_line(worker: Worker) -> None:
    said = worker.answer("llama", "use_dora, lora_bias", "refused")
    assert said is not None
    assert said.startswith("not made: ValueError: ")


def test_every_case_is_a_family_with_an_option() -> None:
    found = cases()
    assert len(found) == len(set(found)) > 1000
    assert {f for f, _ in found} == FAMILIES.keys()
    assert {o for _, o in found} == OPTIONS.keys()


# The recorded result


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return dict(json.loads((RESULTS / "semantics.json").read_text()))


def test_the_recorded_matrix_has_no_failure(result: dict[str, Any]) -> None:
    counts = Counter((version, outcome) for version, _, _, outcome, _ in tables.cells(result))
    assert {o for _, o in counts} == {"exact", "file", "refused", "peft"}
    assert all(counts[e["peft"], "exact"] > 900 for e in result["environments"])
    assert [(r["family"], r["option"]) for r in result["rows"]] == cases()


def test_every_refusal_says_what_to_do(result: dict[str, Any]) -> None:
    reasons = {why for _, _, _, outcome, why in tables.cells(result) if outcome == "refused"}
    assert reasons
    left = [r for r in reasons if not FIXES.search(r)]
    # a rank above a side of the layer, in PiSSA and OLoRA of a tiny Mamba: only a question says what to look at
    assert all(r.endswith("Is the config of another adapter beside these weights?") for r in left), left
    assert len(left) <= 1
