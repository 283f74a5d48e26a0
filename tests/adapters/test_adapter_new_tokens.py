"""Tokens that were added before an adapter was trained: PEFT saves the longer tables, and rows are taken by token."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.merging import actmat
from tests.helpers.tinymodels import made
from tests.tolerances import F32_ELEMENTWISE
from torch import Tensor

from actmat.experts.locate import fit_expert, locate, open_handle, require_model, stored_of
from actmat.recipe.vocabulary import Vocabulary, vocabulary_aligner

ROWS, WIDTH = 24, 16
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WORDS = [f"w{i}" for i in range(ROWS)]


def write_tokenizer(folder: Path, added: list[str]) -> None:
    entries = [{"id": ROWS + k, "content": t, "special": True} for k, t in enumerate(added)]
    data = {"model": {"vocab": {w: i for i, w in enumerate(WORDS)}}, "added_tokens": entries}
    (folder / "tokenizer.json").write_text(json.dumps(data))


def make_base(folder: Path, **config: Any) -> Path:
    settings = {"vocab_size": ROWS, "hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2} | config
    made("llama", num_hidden_layers=1, **settings).save_pretrained(folder)
    write_tokenizer(folder, [])
    return folder


def make_adapter(base: Path, folder: Path, added: list[str], targets: list[str], **config: Any) -> Mapping[str, Tensor]:
    """An adapter with added tokens in a folder; returns the merged model that PEFT makes of it."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(len(added) + len(targets))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    if added:
        model.resize_token_embeddings(ROWS + len(added), mean_resizing=False)
    settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **config)
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(folder, save_embedding_layers=bool(added))
    if added:
        write_tokenizer(folder, added)
    found: Mapping[str, Tensor] = adapted.merge_and_unload().state_dict()
    return found


TARGETS = {"layers": ["q_proj"], "the table too": ["q_proj", "embed_tokens"]}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("flag", ["union", "adapter"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("tied", [False, True])
def test_one_adapter_is_merged_as_by_peft(flag: str, targets: str, tied: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=tied)
    wanted = make_adapter(base, tmp_path / "adapter", ["<a>", "<b>"], TARGETS[targets])
    out = tmp_path / "out"
    flags = ["-b", str(base), "-e", str(tmp_path / "adapter"), "--set", f"vocabulary={flag}"]
    refused = targets == "the table too" and not tied
    done = actmat(["merge", *flags, "--out", out], code=int(refused))
    if refused:  # PEFT does not save the new rows of the head
        assert "no such table of the same width" in done.words
        return
    for name, tensor in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=F32_ELEMENTWISE, atol=F32_ELEMENTWISE, msg=name)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == ROWS + 2
    tokens = json.loads((out / "tokenizer.json").read_text())["added_tokens"]
    assert [(t["content"], t["id"]) for t in tokens] == [("<a>", ROWS), ("<b>", ROWS + 1)]
    assert actmat(["verify", out]).out.startswith("intact")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_names_with_wrappers_are_read_in_other_processes_too(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=False)
    wanted = make_adapter(base, tmp_path / "adapter", ["<a>"], ["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({f"module._orig_mod.{n}": t for n, t in load_file(file).items()}, file)
    with locate(tmp_path / "adapter") as located, locate(base) as model:
        opened, found, _ = vocabulary_aligner()(
            require_model(model), {"one": stored_of(located)}, Vocabulary(source="union")
        )
        expert = fit_expert(located.with_rows(found["one"]), opened)
        with open_handle(pickle.loads(pickle.dumps(expert.handle()))) as again:
            table = again.read(TABLE)
    torch.testing.assert_close(table, wanted[TABLE], rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_two_adapters_have_a_row_for_each_token(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=False)
    one = make_adapter(base, tmp_path / "one", ["<a>", "<b>"], ["q_proj"])
    two = make_adapter(base, tmp_path / "two", ["<b>", "<c>", "<d>"], ["q_proj"])
    flags = ["-b", str(base), "-e", str(tmp_path / "one"), "-e", str(tmp_path / "two"), "-m", "linear"]
    actmat(["merge", *flags, "--set", "vocabulary=union", "--out", tmp_path / "out"], code=0)
    got = load_file(tmp_path / "out" / "model.safetensors")
    for name in (TABLE, HEAD):
        a, b, c, d = one[name][ROWS], (one[name][ROWS + 1] + two[name][ROWS]) / 2, *two[name][ROWS + 1 :]
        rows = torch.stack([*((one[name] + two[name][: ROWS + 2]) / 2)[:ROWS], a, b, c, d])
        torch.testing.assert_close(got[name], rows, rtol=F32_ELEMENTWISE, atol=F32_ELEMENTWISE)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_deltas_of_rows_that_move_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=False)
    make_adapter(base, tmp_path / "one", [], ["embed_tokens"])
    other = make_base(tmp_path / "other", tie_word_embeddings=False)
    order = {"model": {"vocab": {w: i for i, w in enumerate(reversed(WORDS))}}}
    (other / "tokenizer.json").write_text(json.dumps(order))
    flags = ["-b", str(base), "-e", str(tmp_path / "one"), "-e", str(other)]
    flags += ["-m", "linear", "--set", "vocabulary=other"]
    refused = actmat(["plan", *flags], code=1)
    assert "whose rows have another order in the new vocabulary" in refused.words
