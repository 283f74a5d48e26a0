"""Experts of another vocabulary: rows are taken by token, in the base's order."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.merging import CONFIG, actmat, llama_tensors, save_checkpoint
from tests.tolerances import F32_ELEMENTWISE

from actmat.checkpoints.model import Model
from actmat.checkpoints.resolve import open_handle, open_model
from actmat.errors import CheckpointError
from actmat.extras.vocabulary.align import align_vocabularies
from actmat.extras.vocabulary.rows import TokenRows
from actmat.extras.vocabulary.tokenizer import read_tokenizer
from actmat.recipe.vocabulary import TokenRow, Vocabulary

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


def aligned(source: str, *labels: str, **policy: Any) -> tuple[Model, dict[str, Model]]:
    """Base and experts, opened and put in order."""
    opened = {label: open_model(label) for label in labels}
    base, experts, _ = align_vocabularies(open_model("base"), opened, Vocabulary(source=source, **policy))
    return base, experts


def test_rows_are_taken_by_token(folder: Path) -> None:
    base, experts = aligned("base", "expert")
    expert = experts["expert"]
    assert not isinstance(base.tensors, TokenRows), "its rows stay as they are"
    assert "2 missing tokens come from other inputs, 2 tokens outside the new vocabulary" in expert.folder.notes[0].text
    for name in (EMBEDDING, HEAD):
        assert expert.specs[name].shape == base.specs[name].shape
        assert torch.equal(expert.tensors.read(name), wanted(folder, name))
        whole = wanted(folder, name).numpy().tobytes()
        for start, size in ((0, 640), (5, 100), (31, 1), (64, 96), (600, 40), (7, 0)):
            buffer = bytearray(size)
            expert.tensors.read_into(name, start, memoryview(buffer))
            assert bytes(buffer) == whole[start : start + size]
    assert torch.equal(
        expert.tensors.read("model.norm.weight"), load_file("expert/model.safetensors")["model.norm.weight"]
    )
    with pytest.raises(ValueError, match="640"):
        expert.tensors.read_into(EMBEDDING, 630, memoryview(bytearray(20)))
    paths = [Path(i.path).name for i in expert.tensors.identity()]
    assert paths.count("tokenizer.json") == 2, "a change of a tokenizer is a change of the input"


def test_a_handle_opens_the_same_rows(folder: Path) -> None:
    _, experts = aligned("base", "expert")
    handle = pickle.loads(pickle.dumps(experts["expert"].tensors.handle()))
    with open_handle(handle) as again:
        assert torch.equal(again.read(HEAD), wanted(folder, HEAD))


def test_the_same_vocabulary_needs_no_other_order(folder: Path) -> None:
    tokenizer(save_checkpoint(folder / "same", llama_tensors(seed=6)), BASE)
    base, experts = aligned("union", "same")
    assert not isinstance(base.tensors, TokenRows)
    assert not isinstance(experts["same"].tensors, TokenRows)


def rows_of(place: str, name: str = EMBEDDING) -> torch.Tensor:
    return load_file(f"{place}/model.safetensors")[name]


def test_a_union_lends_new_rows(folder: Path) -> None:
    """<a> of one expert is its row everywhere; <b> of two is lent as their mean; padding stays the base's."""
    for number, (name, new) in enumerate({"one": ["<a>", "<b>"], "two": ["<b>", "<c>", "<d>"]}.items()):
        tensors = llama_tensors(seed=7 + number)
        tensors |= {n: torch.cat([tensors[n][:18], torch.randn(len(new), 8)]) for n in (EMBEDDING, HEAD)}
        place = save_checkpoint(folder / name, tensors, CONFIG | {"vocab_size": 18 + len(new)})
        tokenizer(place, BASE)
        added = [{"id": 17, "content": BASE[-1]}, *({"id": 18 + k, "content": t} for k, t in enumerate(new))]
        edit_json(place / "tokenizer.json", added_tokens=added)
    base, experts = aligned("union", "one", "two")
    one, two, own = rows_of("one"), rows_of("two"), rows_of("base")
    mean = (one[19].double() + two[18].double()).div(2).float()
    assert torch.equal(base.tensors.read(EMBEDDING), torch.stack([*own[:18], one[18], mean, two[19], two[20]]))
    assert torch.equal(experts["one"].tensors.read(EMBEDDING), torch.stack([*one, two[19], two[20]]))
    assert torch.equal(
        experts["two"].tensors.read(EMBEDDING), torch.stack([*two[:18], one[18], two[18], two[19], two[20]])
    )
    assert base.config["vocab_size"] == 22
    listed = json.loads(base.folder.texts["tokenizer.json"])["added_tokens"]
    assert [(e["content"], e["id"]) for e in listed[1:]] == [("<a>", 18), ("<b>", 19), ("<c>", 20), ("<d>", 21)]
    assert "18 '<a>', 19 '<b>', 20 '<c>'" in base.folder.notes[1].text
    _, by_name = aligned("two", "one", "two")
    assert torch.equal(by_name["one"].tensors.read(EMBEDDING), torch.stack([*one[:18], one[19], two[19], two[20]]))
    with open_handle(base.tensors.handle()) as again:
        assert torch.equal(again.read(HEAD), base.tensors.read(HEAD))


def test_new_tokens_fill_padding_and_sizes_are_rounded(folder: Path) -> None:
    rows = {"<new>": TokenRow(model="base", token="t3"), "<zero>": TokenRow(), "t1": TokenRow(model="base", token_id=9)}
    rows["t2"] = TokenRow(model="expert", token="newer", force=True)
    own = rows_of("base")
    base, _ = aligned("base", "expert", tokens=rows)
    wanted_rows = torch.stack([*own[:2], rows_of("expert")[17], *own[3:18], own[3], torch.zeros(8)])
    assert torch.equal(base.tensors.read(EMBEDDING), wanted_rows), "two new tokens in the two rows of padding"
    base, experts = aligned("base", "expert", tokens=rows, pad_to_multiple_of=8)
    mean = wanted_rows.double().mean(0).float()
    assert torch.equal(base.tensors.read(EMBEDDING), torch.stack([*wanted_rows, *[mean] * 4]))
    assert torch.equal(experts["expert"].tensors.read(EMBEDDING)[1], own[9]), "lent, as the expert has no t1"


def test_tables_of_several_dtypes_and_tied_heads(folder: Path) -> None:
    tensors = {n: t.bfloat16() for n, t in llama_tensors(seed=5).items()}
    tensors |= {EMBEDDING: tensors[EMBEDDING][: len(EXPERT)]}
    del tensors[HEAD]
    tied = CONFIG | {"tie_word_embeddings": True, "vocab_size": len(EXPERT)}
    tokenizer(save_checkpoint(folder / "tied", tensors, tied), EXPERT)
    base, experts = aligned("tied", "tied")
    own, lent = rows_of("base", HEAD), tensors[EMBEDDING].float()
    found = base.tensors.read(HEAD)
    assert torch.equal(found[0], lent[0]), "of the head of a tied model, which is its embedding"
    assert torch.equal(found[16], own[0])
    back, experts = aligned("base", "tied")
    assert torch.equal(experts["tied"].tensors.read(EMBEDDING)[1], rows_of("base")[1].bfloat16())
    assert torch.equal(back.tensors.read(HEAD), own)


def test_what_cannot_be_joined_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 tokens of its own .*'new'.*cannot be joined"):
        aligned("union", "expert")
    rows = {
        "x": TokenRow(model="nobody"),
        "y": TokenRow(model="base", token="new"),
        "z": TokenRow(model="base", token_id=99),
    }
    with pytest.raises(CheckpointError) as found:
        aligned("base", "expert", tokens=rows)
    assert [p.partition("row of ")[2][:3] for p in found.value.problems] == ["'x'", "'y'", "'z'"]
    narrow = {n: t[:, :4] if t.ndim == 2 else t for n, t in llama_tensors().items()}
    tokenizer(save_checkpoint(folder / "narrow", narrow), EXPERT)
    with pytest.raises(CheckpointError, match="no such table of the same width"):
        aligned("base", "narrow")
    shutil.rmtree(folder / "narrow")


def test_damaged_tokenizers_are_refused(folder: Path) -> None:
    """A row number far outside would make tables of billions of rows."""
    data = json.loads((folder / "base" / "tokenizer.json").read_text())
    data["model"]["vocab"]["far"] = 2_000_000_000
    (folder / "base" / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="last token has row 2000000000"):
        aligned("base", "expert", tokens={"newest": TokenRow()})
    (folder / "base" / "tokenizer.json").write_text(json.dumps(data | {"added_tokens": 7}))
    with pytest.raises(CheckpointError, match="expected a list of added tokens, found '7'"):
        aligned("base", "expert")


def test_a_tokenizer_is_needed(folder: Path) -> None:
    (folder / "expert" / "tokenizer.json").write_text("{}")
    with open_model("expert") as found, pytest.raises(CheckpointError, match="expected a vocabulary"):
        read_tokenizer(found)
    (folder / "expert" / "tokenizer.json").unlink()
    refused = actmat(["plan", "-b", "base", "-e", "expert", "--set", "vocabulary=base"], code=1)
    assert "needs it to match rows by token. Fix: save the tokenizer next" in refused.words


def test_a_merge_takes_the_rows_of_the_base(folder: Path) -> None:
    flags = ["-b", "base", "-e", "expert", "-m", "average", "--set", "scope=all", "--set", "vocabulary=base"]
    done = actmat(["merge", *flags, "--out", "out", "--threads", "1"], code=0)
    got = load_file("out/model.safetensors")
    torch.testing.assert_close(got[EMBEDDING], wanted(folder, EMBEDDING), rtol=F32_ELEMENTWISE, atol=F32_ELEMENTWISE)
    assert "its rows are matched by token; 2 missing tokens" in done.words
    actmat(["merge", *flags, "--out", "out"], code=0)
    assert actmat(["verify", "out"]).out.startswith("intact")
    without = actmat(["plan", *flags[:4]], code=1)
    assert "another vocabulary" in without.err


def add(folder: Path, name: str, values: dict[str, torch.Tensor]) -> None:
    """Store one more tensor in base and expert."""
    for place, value in values.items():
        text = (folder / place / "tokenizer.json").read_text()
        save_checkpoint(folder / place, {**load_file(folder / place / "model.safetensors"), name: value})
        (folder / place / "tokenizer.json").write_text(text)


@pytest.mark.parametrize("name", ["vocab_projector.bias", "pred_layer.proj.bias", "decoder.bias"])
def test_every_vector_with_an_entry_per_token_follows_its_tokens(name: str, folder: Path) -> None:
    """Biases of heads have other names in every family: what is as long as the vocabulary belongs to it."""
    ours, theirs = torch.arange(20.0), 100 + torch.arange(float(len(EXPERT)))
    add(folder, name, {"base": ours, "expert": theirs})
    right = [theirs[EXPERT.index(t)] if t in EXPERT else ours[i] for i, t in enumerate(BASE)]
    moved = aligned("base", "expert")[1]["expert"].tensors.read(name)
    assert moved[: len(BASE)].tolist() == [float(value) for value in right]


def test_an_axis_of_tokens_without_rows_is_refused(folder: Path) -> None:
    add(folder, "final_logits_bias", {"base": torch.zeros(1, 20), "expert": torch.zeros(1, len(EXPERT))})
    with pytest.raises(CheckpointError, match=r"final_logits_bias has an axis of 18 entries, one per token.* Fix: "):
        aligned("base", "expert")
