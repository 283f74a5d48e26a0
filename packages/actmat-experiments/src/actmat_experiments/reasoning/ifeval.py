"""IFEval: whether an answer follows its instructions, by the checkers of lm-evaluation-harness.

Strict: the answer as it is. Loose: the answer, or the answer without its first line, its last line or its asterisks.
J. Zhou et al., "Instruction-following evaluation for large language models", 2023.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from actmat.errors import MergeError

__all__ = ["Followed", "check_sentence_model", "followed"]

_LOCK = threading.Lock()
_SPLITS_SENTENCES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}


@dataclass(frozen=True, slots=True)
class Followed:
    """Which instructions of a prompt an answer follows, in their order.

    Args:
        strict: by the letter.
        loose: with what models put around an answer taken off.
    """

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def followed(problem: Mapping[str, Any], answer: str) -> Followed:
    """Check one answer.

    Args:
        problem: a row of the data set: key, prompt, instruction_id_list, kwargs.
    """
    with _LOCK:  # the environment belongs to all threads
        judge = _judge()
    found = judge(dict(problem), [answer])
    return Followed(tuple(found["inst_level_strict_acc"]), tuple(found["inst_level_loose_acc"]))


def check_sentence_model(problems: Sequence[Mapping[str, Any]]) -> None:
    """Some instructions want text split into sentences, by a model of nltk that is a download of its own.

    Raises:
        MergeError: it is needed and not there.
    """
    if not any(_SPLITS_SENTENCES & set(p["instruction_id_list"]) for p in problems):
        return
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise MergeError(
            "IFEval splits text into sentences by nltk's model 'punkt_tab', which is not installed. "
            "Fetch it once: python -m nltk.downloader punkt_tab. "
            "Without network, unpack it into a folder nltk_data/tokenizers that NLTK_DATA names the parent of."
        ) from None


@functools.cache
def _judge() -> Callable[[dict[str, Any], list[str]], dict[str, Any]]:
    with _offline():
        import langdetect
        from lm_eval.tasks.ifeval.utils import process_results

    langdetect.DetectorFactory.seed = 0  # it guesses languages at random otherwise
    return process_results  # type: ignore[no-any-return]


@contextmanager
def _offline() -> Iterator[None]:
    """The checkers download on import unless they believe to be a helper process."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
