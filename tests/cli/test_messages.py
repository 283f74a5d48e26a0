"""Messages name the file, the value and the cause that are to blame."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.merging import EMBEDDING, Family, actmat, save_checkpoint


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_base(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def denied(path: Path | str, *args: Any, **options: Any) -> int:
        if path == family.base / "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", denied)
    outcome = actmat(family.argv(), code=1)
    assert f"{family.base / 'tokenizer.json'}: cannot be read: Permission denied" in outcome.err
    assert "Cannot write" not in outcome.err


def test_ties_that_do_not_hold_have_a_headline_of_their_own(family: Family) -> None:
    for folder in (family.base, *family.experts):
        edit_json(folder / "config.json", tie_word_embeddings=True)
        family.change(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    family.change(family.experts[0], lambda t: t["lm_head.weight"].add_(1.0))
    outcome = actmat(family.argv(), code=1)
    assert "config.json ties and that differ: 1 problem" in outcome.err
    assert "NaN" not in outcome.err


def test_a_base_of_another_architecture_is_told_in_one_line(family: Family) -> None:
    save_checkpoint(family.experts[0], {f"encoder.block.{i}.w": torch.ones(8, 8) for i in range(300)})
    outcome = actmat(family.argv(), code=1)
    assert outcome.err.count("expert0") <= 2
    assert "no tensor name in common with the base" in outcome.err
    assert "'encoder.block.0.w'" in outcome.err
    assert "another architecture" in outcome.err
