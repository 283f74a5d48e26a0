"""Experts with tokens of their own: merged, saved with a tokenizer, loaded again, tokenized and run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.merging import actmat
from tests.helpers.tinymodels import made
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT, relative_error
from torch import Tensor

import actmat as library
from actmat.errors import MergeError

LETTERS = ["<unk>", "<s>", "</s>", *"abcdefghij"]
PADDED = 16
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_model(folder: Path, seed: int, new: list[str], *, tied: bool = False, rows: int | None = None) -> None:
    """A tiny Llama with a tokenizer of letters and of the tokens `new`, which come after the letters.

    Without such tokens it is the base that the others were trained from.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(LETTERS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.add_tokens([AddedToken(t, special=True, normalized=False) for t in new], special_tokens=True)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    model = made("llama", vocab_size=rows or PADDED, tie_word_embeddings=tied, **ids, **sizes)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if new else ():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base padded to 16 rows of 13 tokens; experts with tokens of their own, one with a larger table."""
    folder = tmp_path_factory.mktemp("vocabularies")
    save_model(folder / "base", 1, [])
    save_model(folder / "chat", 2, ["<user>", "<bot>"])
    save_model(folder / "tool", 3, ["<call>", "<user>", "<ret>", "<x>"], rows=20)
    save_model(folder / "tied", 4, ["<user>"], tied=True)
    return folder


def row(folder: Path, token: str, table: str = "input") -> Tensor:
    model, tokenizer = loaded(folder)
    layer = model.get_input_embeddings() if table == "input" else model.get_output_embeddings()
    weight: Tensor = layer.weight.detach()[tokenizer.convert_tokens_to_ids(token)]
    return weight


def test_a_union_is_loaded_tokenized_and_run(family: Path, tmp_path: Path) -> None:
    report = library.merge(
        family / "base", [family / "chat", family / "tool"], method="task_arithmetic", options={"scaling": 0.5},
        scope="all", vocabulary="union", out=tmp_path / "out", durable=False,
    )  # fmt: skip
    model, tokenizer = loaded(report.out)
    assert tokenizer.get_added_vocab().keys() >= {"<user>", "<bot>", "<call>", "<ret>", "<x>"}
    assert model.config.vocab_size == 18, "13 tokens and 5 new ones, of which 3 lie in the padding"
    ids = tokenizer("<user>ab<call>c<bot>", return_tensors="pt").input_ids
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["<user>", "a", "b", "<call>", "c", "<bot>"]
    assert bool(model(ids).logits.isfinite().all())
    for table in ("input", "output"):
        chat, tool = row(family / "chat", "<user>", table), row(family / "tool", "<user>", table)
        assert relative_error(row(report.out, "<user>", table), (chat + tool) / 2) < F32_ELEMENTWISE
        assert torch.equal(row(report.out, "<bot>", table), row(family / "chat", "<bot>", table))
        assert torch.equal(row(report.out, "<x>", table), row(family / "tool", "<x>", table))
        base, one, two = (row(family / m, "a", table) for m in ("base", "chat", "tool"))
        assert relative_error(row(report.out, "a", table), base + 0.5 * (one - base) + 0.5 * (two - base)) < F32_PRODUCT
    notes = " ".join(map(str, report.plan.notes))
    assert "base: 5 tokens are new to its tokenizer: 13 '<user>', 14 '<bot>'" in notes
    assert notes == " ".join(n["text"] for n in report.manifest["notes"] if not n["code"])
    assert actmat(["verify", report.out]).out.startswith("intact")
    again = library.merge(
        family / "base", [family / "chat", family / "tool"], method="task_arithmetic", options={"scaling": 0.5},
        scope="all", vocabulary="union", out=tmp_path / "out", durable=False,
    )  # fmt: skip
    assert again.was_finished


def test_the_vocabulary_of_an_expert(family: Path, tmp_path: Path) -> None:
    flags = ["-b", str(family / "base"), "-e", f"chat={family / 'chat'}", "-e", f"tool={family / 'tool'}"]
    actmat(["merge", *flags, "--set", "vocabulary=tool", "--out", tmp_path / "out", "--threads", "2"], code=0)
    model, tokenizer = loaded(tmp_path / "out")
    assert model.config.vocab_size == 20, "the padded table of that expert"
    own = loaded(family / "tool")[1]
    assert tokenizer.get_vocab() == own.get_vocab()
    assert bool(model(tokenizer("a<x>", return_tensors="pt").input_ids).logits.isfinite().all())
    assert actmat(["verify", tmp_path / "out"]).out.startswith("intact")


def test_a_tied_expert_lends_its_embedding_as_head(family: Path, tmp_path: Path) -> None:
    report = library.merge(
        family / "base", [family / "tied"], method="linear", scope="all", vocabulary="union", out=tmp_path / "out",
        durable=False,
    )  # fmt: skip
    assert relative_error(row(report.out, "<user>", "output"), row(family / "tied", "<user>")) < F32_ELEMENTWISE
    assert relative_error(row(report.out, "a", "output"), row(family / "tied", "a")) < F32_ELEMENTWISE


def test_a_union_of_tied_models_stays_tied(family: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other", 6, ["<bot>"], tied=True)
    report = library.merge(
        family / "tied", [tmp_path / "other"], method="average", vocabulary="union", out=tmp_path / "out", durable=False
    )
    model, tokenizer = loaded(report.out)
    assert model.config.tie_word_embeddings
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert relative_error(row(report.out, "<bot>"), row(tmp_path / "other", "<bot>")) < F32_ELEMENTWISE
    assert tokenizer.convert_tokens_to_ids("<bot>") == 14


@pytest.mark.parametrize("method", ["actmat", "ties", "karcher"])
def test_methods_keep_the_row_of_a_token_that_one_expert_has(family: Path, tmp_path: Path, method: str) -> None:
    """Every input is lent that row, so that its deltas are 0: elementwise and row-wise the result is that row."""
    report = library.merge(
        family / "base", [family / "chat", family / "tool"], method=method, vocabulary="union", out=tmp_path / "out",
        durable=False,
    )  # fmt: skip
    assert relative_error(row(report.out, "<bot>"), row(family / "chat", "<bot>")) < F32_ELEMENTWISE
    model, tokenizer = loaded(report.out)
    assert bool(model(tokenizer("a<bot>", return_tensors="pt").input_ids).logits.isfinite().all())


def test_recipes_name_rows_and_sizes(family: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "base": str(family / "base"),
                "experts": [str(family / "chat"), str(family / "tool")],
                "method": "average",
                "output": {
                    "kind": "model",
                    "vocabulary": {
                        "source": "union",
                        "pad_to_multiple_of": 32,
                        "tokens": {
                            "<user>": {"model": "tool", "force": True},
                            "<new>": {"model": "base", "token": "a"},
                        },
                    },
                },
            }
        )
    )
    actmat(["merge", recipe, "--out", tmp_path / "out"], code=0)
    model, tokenizer = loaded(tmp_path / "out")
    assert model.config.vocab_size == 32
    assert relative_error(row(tmp_path / "out", "<user>"), row(family / "tool", "<user>")) < F32_ELEMENTWISE
    assert relative_error(row(tmp_path / "out", "<new>"), row(family / "base", "a")) < F32_ELEMENTWISE
    assert tokenizer("<new>").input_ids == [tokenizer.convert_tokens_to_ids("<new>")]


def test_a_search_compares_predictions_over_one_vocabulary(family: Path, tmp_path: Path) -> None:
    data = {"chat": tmp_path / "a.txt"}
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(MergeError, match="over one vocabulary"):
        library.tune(family / "base", [family / "chat"], data=data, vocabulary="union", out=tmp_path / "out")


def test_choices_that_do_not_go_together_are_refused(family: Path, tmp_path: Path) -> None:
    common = {"out": tmp_path / "out", "method": "average"}
    with pytest.raises(MergeError, match=r"'chatt'; it must be one of \['base', 'union'"):
        library.merge(family / "base", [family / "chat"], vocabulary="chatt", **common)
    with pytest.raises(MergeError, match="drop 'files_from: tool'"):
        library.merge(
            family / "base", [family / "chat", family / "tool"], vocabulary="union", files_from="tool", **common
        )
    shutil.copytree(family / "chat", tmp_path / "chat")
    (tmp_path / "chat/tokenizer.json").unlink()
    with pytest.raises(MergeError, match=r"tokenizer\.json is missing"):
        library.merge(family / "base", [tmp_path / "chat"], vocabulary="union", **common)
