"""IFEval on excerpts: answers that follow by the letter, only loosely, or not."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from actmat.errors import MergeError
from actmat_experiments.reasoning import marks
from actmat_experiments.reasoning.marks import check_sentence_model, followed

DATA = Path(__file__).parent / "data" / "IFEval_input_data.jsonl"
PROBLEMS = {p["key"]: p for p in map(json.loads, DATA.read_text().splitlines())}


@pytest.mark.parametrize(
    ("key", "answer", "strict", "loose"),
    [
        (1001, "A journey to Kyoto and no more", (True,), (True,)),
        (1001, "First Tokyo, then Kyoto", (False,), (False,)),
        (1001, "Sure, here it is:\nTo Kyoto thou shalt go", (False,), (True,)),
        (1001, "To Kyoto thou shalt go\nFare thee well, friend", (False,), (True,)),
        (1001, "", (False,), (False,)),
        (1001, "  \n ", (False,), (False,)),
        (1019, "are the two young boys playing with the horns in the garden?", (True,), (True,)),
        (1019, "Are the two young boys playing with the horns?", (False,), (False,)),
        (1075, '{"title": "Diapers"}', (True,), (True,)),
        (1075, 'Here you are:\n{"title": "Diapers"}', (False,), (True,)),
        (1075, "no JSON at all", (False,), (False,)),
        (1286, "\n".join(f"* point {i}" for i in range(6)), (True,), (True,)),
        (1286, "\n".join(f"* point {i}" for i in range(5)), (False,), (False,)),
        (1286, "\n".join(f"* point {i}" for i in range(7)), (False,), (True,)),
    ],
)
def test_answers_are_judged_as_by_hand(key: int, answer: str, strict: tuple[bool], loose: tuple[bool]) -> None:
    found = followed(PROBLEMS[key], answer)
    assert found.strict == strict
    assert found.loose == loose


def test_every_instruction_is_judged_for_itself() -> None:
    poem = "SECTION 1\na\nSECTION 2\nb\nSECTION 3\nc\nSECTION 4\nd\nCan I get my money back for the classes I missed?"
    assert followed(PROBLEMS[1127], poem).strict == (True, True)
    assert followed(PROBLEMS[1127], poem + " Bye").strict == (True, False)
    assert followed(PROBLEMS[1127], poem.replace("SECTION 4\n", "")).strict == (False, True)


def test_verdicts_on_languages_do_not_change() -> None:
    """Languages are guessed at random unless a seed is set."""
    assert len({followed(PROBLEMS[1019], "a b c d e").strict for _ in range(10)}) == 1


def test_a_missing_sentence_model_is_told_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    def absent(name: str) -> Any:
        raise LookupError(name)

    monkeypatch.setattr(nltk.data, "find", absent)
    check_sentence_model(list(PROBLEMS.values()))
    counting = {"instruction_id_list": ["length_constraints:number_sentences"]}
    with pytest.raises(MergeError, match="punkt_tab"):
        check_sentence_model([*PROBLEMS.values(), counting])


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    import nltk
    from lm_eval.tasks.ifeval import instructions_util

    from actmat_experiments.reasoning.marks import _offline

    def download(*_: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(nltk, "download", download)
    with _offline():
        importlib.reload(instructions_util)


def test_threads_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LOCAL_RANK that stayed behind would make later libraries wait for other processes."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    marks._judge.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: followed(PROBLEMS[1001], "no comma").strict[0], range(32)))
    assert "LOCAL_RANK" not in os.environ
