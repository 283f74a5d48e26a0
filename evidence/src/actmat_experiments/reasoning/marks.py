"""The number that a text gives as its answer (AIME), and the instructions that it follows (IFEval)."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from actmat.errors import MergeError

_SAID = re.compile(r"answer\s*(?:is|:|=)?\s*[:=]?\s*\**\s*(\$?\\?\(?\s*[\d,]+)", re.IGNORECASE)
_WRAPPING = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|\\[,;!: ]|[\s$*]|\\[()\[\]]|\{,\}")
_UNIT = re.compile(
    r"(?<=\d)(?:\.0+)?(?:\^?\{?\\circ\}?|°|\\?%|(?:\s|\\[,;: ])*\\(?:text|mathrm)\s*\{[A-Za-z .]+\}(?:\^\{?[23]\}?)?"
    r"|\s+[A-Za-z]{2,}[A-Za-z ]*)?\s*\.?$"
)
"""Behind a number: zeros of a decimal, degrees, per cent, or a unit in words."""


def aime_answer(text: str) -> int | None:
    r"""The answer of an AIME problem, an integer from 0 to 999 (written 000 to 999), or None if the text gives none.

    The last `\boxed{...}` that holds such an integer counts, else the last "answer is ..." or "Answer: ...". A number
    somewhere in the reasoning is no answer.
    """
    for content in reversed(_boxed(text)):
        number = _integer(content)
        if number is not None:
            return number
    for said in reversed(_SAID.findall(text)):
        number = _integer(said)
        if number is not None:
            return number
    return None


def _boxed(text: str) -> list[str]:
    r"""Contents of all `\boxed{...}`, `\fbox{...}` and `\boxed 7`, braces matched."""
    found = []
    for start in re.finditer(r"\\(?:boxed|fbox)\s*", text):
        rest = text[start.end() :]
        if not rest.startswith("{"):
            number = re.match(r"\d+", rest)
            found += [number[0]] if number else []
            continue
        depth = 0
        for place, sign in enumerate(rest):
            depth += (sign == "{") - (sign == "}")
            if depth == 0:
                found.append(rest[1:place])
                break
    return found


def _integer(text: str) -> int | None:
    plain = _UNIT.sub("", text.replace("\\$", "").strip(" $"))
    while (shorter := _WRAPPING.sub(lambda m: m[1] or "", plain)) != plain:
        plain = shorter
    plain = plain.rpartition("=")[2].rstrip(".").replace(",", "")
    return int(plain) if re.fullmatch(r"[0-9]{1,3}", plain) else None


_LOCK = threading.Lock()
_SPLITS_SENTENCES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}


@dataclass(frozen=True, slots=True)
class Followed:
    """For every instruction of a prompt, in their order: True if the answer follows it.

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
    judge: Callable[[dict[str, Any], list[str]], dict[str, Any]] = process_results
    return judge


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
