"""Span corruption, tokenizer, tasks and base of `language-small`."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch
from evidence.tests.helpers.language import TINY, some_items, tiny_model, write_rows, write_small_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actmat.engine.resources import one_thread
from actmat.errors import CheckpointError
from actmat_experiments.language.models import load_tokenizer
from actmat_experiments.language.small.pretrain import (
    Pretraining,
    corrupt,
    new_model,
    pretrain,
    sentinels,
    span_lengths,
    train_tokenizer,
)
from actmat_experiments.language.small.tasks import SMALL_TASKS, load_small

SENTINELS = list(range(1000, 1016))


def restored(prompt: list[int], target: list[int]) -> list[int]:
    """The text, by putting every span of the target in the place of its sentinel."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in SENTINELS:
            last = spans.setdefault(token, [])
        else:
            last.append(token)
    return [t for token in prompt for t in (spans[token] if token in SENTINELS else [token])]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine stalls at times
@given(
    ids=st.lists(st.integers(0, 900), min_size=2, max_size=120),
    seed=st.integers(0, 2**31),
    density=st.floats(0.01, 0.9),
    mean_span=st.floats(1, 8),
)
def test_prompt_and_target_hold_the_text_between_them(ids, seed, density, mean_span) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompt, target = corrupt(ids, SENTINELS, generator, density=density, mean_span=mean_span)
    assert restored(prompt, target) == ids
    used = [t for t in prompt if t in SENTINELS]
    assert used == SENTINELS[: len(used)]  # each once, in order
    assert [t for t in target if t in SENTINELS] == SENTINELS[: len(used) + 1]
    assert target[0] == SENTINELS[0]
    assert target[-1] == SENTINELS[len(used)]
    hidden = len(target) - len(used) - 1
    assert hidden == min(max(round(len(ids) * density), 1), len(ids) - 1)
    positions = [n for n, t in enumerate(prompt) if t in SENTINELS]
    assert all(b - a > 1 for a, b in pairwise(positions))  # spans do not touch


def test_divisions_are_equally_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    found = Counter(tuple(span_lengths(5, 3, generator)) for _ in range(3000))
    assert set(found) == {(1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)}
    assert all(400 < n < 600 for n in found.values())  # 500 each, six standard deviations are 122


@pytest.mark.parametrize(("ids", "marks"), [([1], SENTINELS), ([1, 2], SENTINELS[:1])])
def test_too_little_to_corrupt_is_an_error(ids, marks) -> None:
    with pytest.raises(ValueError, match="two of each"):
        corrupt(ids, marks, torch.Generator())


def test_the_tokenizer_loads_and_gives_back_lower_case_text(tmp_path) -> None:
    train_tokenizer(["Some words of English", "some more words"] * 3, 400, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    ids = tokenizer("Some WORDS, unseen: ñ €", add_special_tokens=False)["input_ids"]
    assert 2 not in ids  # bytes know every character
    assert tokenizer.decode(ids).strip() == "some words, unseen: ñ €"
    marks = sentinels(tokenizer)
    assert len(set(marks)) == 16
    assert tokenizer("<extra_id_3>", add_special_tokens=False)["input_ids"] == [marks[3]]
    assert max(marks) == len(tokenizer) - 1


# Tasks


def test_parts_are_disjoint_and_what_is_tested_is_never_trained_on(tmp_path) -> None:
    write_small_data(tmp_path)
    tested_in_mr = {"text": "shared , SENTENCE .", "label": 1}
    for file, row in (("mr.test", tested_in_mr), ("subj.train", {**tested_in_mr, "text": "Shared sentence"})):
        with (tmp_path / f"{file}.jsonl").open("a") as handle:
            handle.write(json.dumps(row) + "\n")
    write_rows(tmp_path / "wikiqa.train.jsonl", [{"question": "shared sentence?", "sentence": "of its own"}])
    data = load_small(tmp_path, seed=0, n_validation=10)
    assert [t.name for t in data.tasks] == [t.name for t in SMALL_TASKS]
    for task in data.tasks:
        parts = [{i.prompt for i in part} for part in (task.train, task.validation, task.test)]
        assert sum(map(len, parts)) == len(set.union(*parts))
        assert len(task.validation) == 10
    texts = " ".join(data.corpus).lower()
    assert "shared" not in texts
    assert "of its own" in texts
    assert all("shared" not in i.prompt.lower() for t in data.tasks for i in t.train)
    assert all(i.prompt.split(": ", 1)[1] not in data.corpus for t in data.tasks for i in (*t.validation, *t.test))


def test_layout_is_cut_and_answers_are_words(tmp_path) -> None:
    write_small_data(tmp_path)
    write_rows(
        tmp_path / "agnews.test.jsonl",
        [{"text": "Title: Rain\nText: It rains  today\x85.\n", "label": "World"}, {"text": " ", "label": "World"}],
    )
    task = load_small(tmp_path, seed=0, n_validation=10).tasks[0]
    assert [i.prompt for i in task.test] == ["news topic: Rain It rains today ."]
    assert task.test[0].target == "world"


def test_another_seed_validates_on_other_rows_and_tests_on_the_same(tmp_path) -> None:
    write_small_data(tmp_path)
    first, again, other = (load_small(tmp_path, seed=s, n_validation=10).tasks[0] for s in (0, 0, 1))
    assert first == again
    assert set(first.validation) != set(other.validation)
    assert first.test == other.test
    few, few_other = (load_small(tmp_path, seed=s, n_validation=10, n_test=6).tasks[0] for s in (0, 1))
    assert few.test == few_other.test
    assert set(few.test) < set(first.test)
    assert len({item.label for item in few.test}) > 1


def test_the_first_training_rows_hold_all_labels_even_of_a_file_sorted_by_label(tmp_path) -> None:
    """The base's mixture and the statistics take the first rows: of a sorted file they would see one answer alone."""
    write_small_data(tmp_path)
    rows = [{"text": f"review number {n}", "label": n // 30} for n in range(60)]
    write_rows(tmp_path / "mr.train.jsonl", rows)
    task, other = (load_small(tmp_path, seed=seed, n_validation=10).tasks[4] for seed in (0, 1))
    assert len(task.train) == 50
    assert 4 <= sum(item.label for item in task.train[:20]) <= 16
    assert task.train != other.train


def test_all_problems_of_the_data_come_at_once(tmp_path) -> None:
    write_small_data(tmp_path)
    (tmp_path / "mr.test.jsonl").unlink()
    write_rows(tmp_path / "trec.train.jsonl", [{"text": "a", "label": 6}, {"txt": "a", "label": 0}])
    with pytest.raises(CheckpointError) as caught:
        load_small(tmp_path, seed=0, n_validation=10)
    assert [p.split(" ")[0].split(": ")[0] for p in caught.value.problems] == [
        "trec.train.jsonl:1:",
        "trec.train.jsonl:2:",
        "mr.test.jsonl",
    ]
    write_small_data(tmp_path, n_train=5)
    with pytest.raises(CheckpointError, match="too few rows"):
        load_small(tmp_path, seed=0, n_validation=10)


# Base


def test_pretraining_lowers_the_loss_of_both_kinds_of_batches() -> None:
    with one_thread():
        chosen = Pretraining(updates=40, batch_size=8, learning_rate=5e-2, supervised=0.5, max_length=16)
        texts = [[40 + (n + k) % 20 for k in range(14)] for n in range(60)]
        seen: list[int] = []
        model = tiny_model()
        losses = pretrain(
            model, texts, some_items(40), list(range(284, 300)), chosen, seed=0, on_step=lambda: seen.append(1)
        )
        assert len(seen) == 40
        assert {kind: 10 < len(found) < 30 for kind, found in losses.items()} == {"texts": True, "questions": True}
        for found in losses.values():
            assert sum(found[-5:]) < 0.7 * sum(found[:5])
        again = tiny_model()
        assert pretrain(again, texts, some_items(40), list(range(284, 300)), chosen, seed=0) == losses
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_new_model_is_a_t5_with_tied_embeddings_that_the_seed_decides() -> None:
    a, b, c = (new_model(TINY, seed=s) for s in (0, 0, 1))
    assert a.lm_head.weight is a.shared.weight is a.encoder.embed_tokens.weight
    assert torch.equal(a.shared.weight, b.shared.weight)
    assert not torch.equal(a.shared.weight, c.shared.weight)
