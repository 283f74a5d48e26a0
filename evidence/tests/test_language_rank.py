"""Rank classification against a loop over single tokens; statistics of T5 experts without padding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.language import some_items, tiny_model, written_tokenizer
from evidence.tests.helpers.tolerances import F32_PRODUCT, F64_IDENTITY

from actmat.engine.resources import one_thread
from actmat.errors import CheckpointError
from actmat.statistics import open_statistics
from actmat_experiments.harness.measuring import measure_expert
from actmat_experiments.language.exams import (
    IGNORED,
    Encoded,
    batches_by_length,
    choice_tensors,
    chosen,
    encode,
    score_choices,
    training_tensors,
)
from actmat_experiments.language.models import load_t5, load_tokenizer
from actmat_experiments.language.questions import Item

# Rank classification against a loop over single tokens in float64, and batches of items.


RAGGED = [
    Encoded((5, 6, 7, 1), ((20, 1), (21, 22, 23, 1), (20, 24, 1)), 0),
    Encoded((8, 1), ((30, 31, 1), (32, 1)), 1),
    Encoded((9, 10, 11, 12, 13, 14, 1), ((40, 1), (41, 1), (42, 43, 44, 45, 1)), 2),
]


def looped(model, item: Encoded) -> list[float]:
    """Sum of log-probabilities, one token of one choice at a time, each from a whole forward pass."""
    scores = []
    for choice in item.choices:
        before, total = [model.config.decoder_start_token_id], 0.0
        for token in choice:
            logits = model(input_ids=torch.tensor([item.prompt]), decoder_input_ids=torch.tensor([before])).logits
            total += math.log(torch.softmax(logits[0, -1], 0)[token].item())
            before.append(token)
        scores.append(total)
    return scores


@pytest.fixture(scope="module")
def model():
    return tiny_model().double()


@torch.inference_mode()
def test_scores_are_those_of_a_loop_over_tokens(model) -> None:
    scores_BC = score_choices(model, RAGGED)
    for row_C, item in zip(scores_BC, RAGGED, strict=True):
        expected = torch.tensor(looped(model, item), dtype=torch.float64)
        assert relative_error(row_C[: len(expected)], expected) < F64_IDENTITY
        assert (row_C[len(expected) :] == -torch.inf).all()
    assert score_choices(tiny_model().bfloat16(), RAGGED).dtype == torch.float32


def test_the_answer_is_the_argmax_whatever_the_batch(model) -> None:
    items = some_items(12) + RAGGED
    one_by_one = torch.tensor([int(torch.tensor(looped(model, item)).argmax()) for item in items])
    for max_tokens in (1, 40, 8192):
        assert torch.equal(chosen(model, items, max_tokens=max_tokens), one_by_one)


def test_the_first_of_equal_choices_wins_and_the_mode_is_left(model) -> None:
    item = Encoded((5, 6, 1), ((20, 1), (20, 1)), 1)
    model.train()
    assert chosen(model, [item]).tolist() == [0]
    assert model.training
    model.eval()
    assert chosen(model, []).tolist() == []


# Tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(written_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_prompts_and_choices_end_and_are_cut_before_the_end(tokenizer) -> None:
    (item,) = encode(tokenizer, [Item("a number of tests " * 5, ("a", "the test"), 1)], max_length=8)
    assert len(item.prompt) == 8
    assert {ids[-1] for ids in (item.prompt, *item.choices)} == {tokenizer.eos_token_id}
    assert tokenizer.decode(item.target, skip_special_tokens=True).strip() == "the test"
    assert encode(tokenizer, [], max_length=8) == []


def test_choices_that_a_cut_makes_equal_are_an_error(tokenizer) -> None:
    with pytest.raises(CheckpointError, match="larger length"):
        encode(tokenizer, [Item("x", ("zzzz zzzz a", "zzzz zzzz b"), 0)], max_length=4)


def test_tensors_of_a_batch() -> None:
    tensors = training_tensors(RAGGED, pad=0)
    assert tensors["input_ids"][1].tolist() == [8, 1, 0, 0, 0, 0, 0]
    assert tensors["attention_mask"].sum(1).tolist() == [4, 2, 7]
    assert tensors["labels"][0].tolist() == [20, 1, IGNORED, IGNORED, IGNORED]
    choices_BCL = choice_tensors(RAGGED)
    assert choices_BCL.shape == (3, 3, 5)
    assert choices_BCL[1, 2].tolist() == [IGNORED] * 5


def test_batches_hold_similar_lengths_and_every_item_once() -> None:
    items = some_items(50)
    batches = list(batches_by_length(items, 30))
    assert sorted(n for batch in batches for n in batch) == list(range(50))
    assert all(len(batch) * max(len(items[n].prompt) for n in batch) <= 30 for batch in batches)
    assert [len(b) for b in batches_by_length(items, 1)] == [1] * 50


# Statistics of T5 experts: padding is left out on both sides, the decoder sees forced answers.


LAYERS = (
    "encoder.block.0.layer.0.SelfAttention.q",
    "encoder.block.1.layer.1.DenseReluDense.wo",
    "decoder.block.0.layer.0.SelfAttention.v",
    "decoder.block.1.layer.1.EncDecAttention.q",
    "decoder.block.0.layer.1.EncDecAttention.k",
    "decoder.block.1.layer.2.DenseReluDense.wi",
)
ITEMS = some_items(5, seed=4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("measure")
    tiny_model(1).save_pretrained(root / "expert")
    written_tokenizer(root / "expert")
    with one_thread():
        where = {"expert": root / "expert", "base": root / "expert", "device": "cpu", "out": root / "statistics"}
        measure_expert(load_t5, [training_tensors(ITEMS[:4], 0)], **where, fisher=True)
    return root / "expert", root / "statistics"


@pytest.mark.parametrize("layer", LAYERS)
def test_grams_are_those_of_items_run_one_by_one(measured: tuple[Path, Path], layer: str) -> None:
    model = load_t5(measured[0])
    inputs = []
    model.get_submodule(layer).register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    total = None
    for item in ITEMS[:4]:  # alone, an item has no padding
        ids, labels = torch.tensor([item.prompt]), torch.tensor([item.target])
        model(input_ids=ids, labels=labels)
        z_NI = inputs.pop().flatten(0, -2).double()
        total = z_NI.T @ z_NI if total is None else total + z_NI.T @ z_NI
    with open_statistics(measured[1]) as statistics:
        key = statistics.find(f"{layer}.weight")
        assert key is not None, statistics.header.absent
        gram_II = statistics.gram(key, dtype=torch.float64)
        # means per token or sums: the rule does not change with one factor for all
        assert relative_error(gram_II / gram_II.trace(), total / total.trace()) < F32_PRODUCT


def test_the_fisher_is_there_for_linear_layers(measured: tuple[Path, Path]) -> None:
    with open_statistics(measured[1]) as statistics:
        fisher = statistics.fisher(f"{LAYERS[0]}.weight")
        assert fisher.shape == (16, 16)
        assert bool((fisher >= 0).all())
        assert bool((fisher > 0).any())
