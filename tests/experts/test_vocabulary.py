"""Experts of another vocabulary: rows are taken by token, in the base's order."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.merging import actmat, llama_tensors, save_checkpoint
from tests.tolerances import F32_ELEMENTWISE

from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import CheckpointError
from actmat.experts.resolve import open_expert, open_handle
from actmat.experts.vocabulary import AlignedExpert, read_vocabulary

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BASE = [f"t{i}" for i in range(18)]  # two rows of padding
EXPERT = ["new", *reversed(BASE[3:]), "t0", "newer"]  # without t1 and t2


def tokenizer(folder: Path, tokens: list[str], *, unigram: bool = False) -> None:
    vocabulary = [[t, -1.0] for t in tokens[:-1]] if unigram else {t: i for i, t in enumerate(tokens[:-1])}
    data = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": len(tokens) - 1, "content": tokens[-1]}]}
    (folder / "tokenizer.json").write_text(json.dumps(data))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base of 20 rows, and an expert of 18 in another order."""
    tokenizer(save_checkpoint(tmp_path / "base", llama_tensors()), BASE)
    tensors = llama_tensors(seed=5)
    tensors |= {n: tensors[n][: len(EXPERT)] for n in (EMBEDDING, HEAD)}
    tokenizer(save_checkpoint(tmp_path / "expert", tensors), EXPERT, unigram=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wanted(folder: Path, name: str) -> torch.Tensor:
    base, own = (load_file(folder / m / "model.safetensors")[name] for m in ("base", "expert"))
    rows = [own[EXPERT.index(t)] if t in EXPERT else base[i] for i, t in enumerate(BASE)]
    return torch.stack([*rows, *base[len(BASE) :]])


def test_rows_are_taken_by_token(folder: Path) -> None:
    with open_checkpoint("base") as base, open_expert("expert", base, vocabulary="base") as expert:
        assert isinstance(expert, AlignedExpert)
        assert (expert.missing, expert.dropped) == (2, 2)
        for name in (EMBEDDING, HEAD):
            assert expert.specs[name].shape == base.specs[name].shape
            assert expert.source(name).nbytes == base.specs[name].nbytes
            assert torch.equal(expert.read(name), wanted(folder, name))
            whole = wanted(folder, name).numpy().tobytes()
            for start, size in ((0, 640), (5, 100), (31, 1), (64, 96), (600, 40), (7, 0)):
                buffer = bytearray(size)
                expert.read_into(name, start, memoryview(buffer))
                assert bytes(buffer) == whole[start : start + size]
        assert torch.equal(expert.read("model.norm.weight"), load_file("expert/model.safetensors")["model.norm.weight"])
        with pytest.raises(ValueError, match="640"):
            expert.read_into(EMBEDDING, 630, memoryview(bytearray(20)))
        paths = [Path(i.path).name for i in expert.identity()]
        assert paths.count("tokenizer.json") == 2, "a change of a tokenizer is a change of the input"


def test_a_handle_opens_the_same_rows(folder: Path) -> None:
    with open_checkpoint("base") as base, open_expert("expert", base, vocabulary="base") as expert:
        handle = pickle.loads(pickle.dumps(expert.handle()))
    with open_handle(handle) as again:
        assert torch.equal(again.read(HEAD), wanted(folder, HEAD))


def test_the_same_vocabulary_needs_no_other_order(folder: Path) -> None:
    tokenizer(save_checkpoint(folder / "same", llama_tensors(seed=6)), BASE)
    with open_checkpoint("base") as base, open_expert("same", base, vocabulary="union") as expert:
        assert torch.equal(expert.read(HEAD)[:18], load_file("same/model.safetensors")[HEAD][:18])


def test_a_union_that_would_lose_tokens_is_refused(folder: Path) -> None:
    with (
        open_checkpoint("base") as base,
        pytest.raises(CheckpointError, match="2 tokens that the base lacks \\('new', 'newer'\\)"),
    ):
        open_expert("expert", base, vocabulary="union")


def test_a_tokenizer_is_needed(folder: Path) -> None:
    (folder / "expert" / "tokenizer.json").write_text("{}")
    with open_checkpoint("expert") as found, pytest.raises(CheckpointError, match="expected a vocabulary"):
        read_vocabulary(found)
    (folder / "expert" / "tokenizer.json").unlink()
    refused = actmat(["plan", "-b", "base", "-e", "expert", "--vocabulary", "base"])
    assert refused.code == 1
    assert "found none. Fix: save the tokenizer beside the weights" in " ".join(refused.err.split())


def test_a_merge_takes_the_rows_of_the_base(folder: Path) -> None:
    flags = ["-b", "base", "-e", "expert", "-m", "average", "--scope", "all", "--vocabulary", "base"]
    done = actmat(["merge", *flags, "--out", "out", "--threads", "1"])
    assert done.code == 0, done.err
    got = load_file("out/model.safetensors")
    torch.testing.assert_close(got[EMBEDDING], wanted(folder, EMBEDDING), rtol=F32_ELEMENTWISE, atol=F32_ELEMENTWISE)
    assert "its rows are taken by token; 2 tokens that it lacks" in " ".join(done.out.split())
    assert actmat(["merge", *flags, "--out", "out"]).code == 0, "a finished merge is recognised"
    assert actmat(["verify", "out"]).out.startswith("intact")
    without = actmat(["plan", *flags[:4]])
    assert without.code == 1
    assert "another vocabulary" in without.err
