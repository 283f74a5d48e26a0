"""Neighbours of tiny models: a sample of changes is said, refused or harmless; the result has many more."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.common import read_result
from benchmarks.families.neighbours import Family, Neighbour, check
from benchmarks.families.tiny import Architecture

from actmat.identity import files, reading


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), [("transformers", "LlamaForCausalLM"), ("diffusers", "UNet2DModel")])
def test_a_sample_of_changes(library: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_ask", reading._ask)  # which `check` replaces
    row = check(Architecture(library, name, name), changes=8)
    assert row["silent"] == []
    assert sum(row["verdicts"].values()) >= 8


@pytest.mark.filterwarnings("ignore")
def test_a_change_that_is_not_compared_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(Architecture("transformers", "LlamaForCausalLM", "llama"), tmp_path)
    (tmp_path / "one" / "generation_config.json").write_text('{"eos_token_id": 7}')
    change = Neighbour("generation_config.json", "eos_token_id", lambda folder: None)
    assert family.verdict("merge", "expert", change, tmp_path / "one") == "said"
    monkeypatch.setattr(files, "_unlike", lambda *a: iter(()))
    assert family.verdict("merge", "expert", change, tmp_path / "one") == "harmless"
    assert family.verdict("merge", "base", change, tmp_path / "one") == "silent"


EXPLAINED = {
    "MaskFormerModel": "an auxiliary loss, which is of training, changes the last bits of its outputs",
    "Inkling2ForConditionalGeneration": "a token more in the header of an export, which no program reads",
}
"""Class with silent rows -> why they are no fault."""


def test_the_result_has_many_classes_and_no_silent_row_unexplained() -> None:
    rows = [row for row in read_result("neighbours")["rows"] if "verdicts" in row]
    assert len(rows) >= 400
    assert {row["class"] for row in rows if row["silent"]} == EXPLAINED.keys()
