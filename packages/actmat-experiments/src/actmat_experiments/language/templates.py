"""Prompts of the seven tasks, as data.

`{field}` is replaced by a field of the row (see `rows`); `{options}` by the row's answers, one a line. A template
without `answers` takes the row's own answers as choices; otherwise the row's label counts in `answers`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

__all__ = ["TEMPLATES", "Template", "get_template"]


@dataclass(frozen=True, slots=True)
class Template:
    """One way to ask.

    Args:
        name: unique within the task.
        prompt: text with `{field}`s.
        answers: choices that are the same for all rows, in the order of the labels; empty: the row's own.
    """

    name: str
    prompt: str
    answers: tuple[str, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Fields that the prompt mentions."""
        return frozenset(name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None)


_NO_YES = ("No", "Yes")

TEMPLATES: dict[str, tuple[Template, ...]] = {
    "qasc": (
        Template("facts", "{fact1} {fact2}\nWith these two facts in mind: {question}\n{options}"),
        Template("question", "{question}\nWhich of these is the best answer?\n{options}"),
        Template("facts_last", "Question: {question}\nKnown: {fact1} {fact2}\nPossible answers:\n{options}\nAnswer:"),
    ),
    "wikiqa": (
        Template("answers_it", "Question: {question}\nSentence: {sentence}\nDoes the sentence answer it?", _NO_YES),
        Template("found", "I asked: {question}\nI was told: {sentence}\nIs that an answer to what I asked?", _NO_YES),
        Template("good", "Is the text a good answer to the question?\nText: {sentence}\nQuestion: {question}", _NO_YES),
    ),
    "quartz": (
        Template("read_first", "{paragraph}\n{question}\n{options}"),
        Template("question_first", "Question: {question}\n{options}\nThis text helps: {paragraph}\nAnswer:"),
        Template("use_text", "Use the text to choose an answer.\nText: {paragraph}\nQuestion: {question}\n{options}"),
    ),
    "paws": (
        Template("same", "First: {sentence1}\nSecond: {sentence2}\nDo both say the same?", _NO_YES),
        Template("rewritten", "{sentence1}\nCould one also write it this way?\n{sentence2}", _NO_YES),
        Template("paraphrase", 'Is "{sentence2}" a paraphrase of "{sentence1}"?', _NO_YES),
    ),
    "story_cloze": (
        Template("how_ends", "{story}\nHow does this story end?\n{options}"),
        Template("better", "Which ending fits the story better?\nStory: {story}\n{options}"),
        Template("continue", "A story: {story}\nIt can go on in one of these ways:\n{options}\nThe natural one:"),
    ),
    "winogrande": (
        Template("stands_for", "{sentence}\nWhat does the _ stand for?\n{options}"),
        Template("fill", "Fill the blank (_) in: {sentence}\nChoose from:\n{options}"),
        Template("either", "{sentence}\nDoes _ mean {option1} or {option2}?"),
    ),
    "wsc": (
        Template("refers", '{text}\nIn this text, does "{pronoun}" refer to {referent}?', _NO_YES),
        Template("same_thing", 'Text: {text}\nAre "{pronoun}" and "{referent}" the same?', _NO_YES),
        Template("means", '"{pronoun}" stands for "{referent}" in the text below. Is that right?\n{text}', _NO_YES),
    ),
}
"""Task -> its templates; the first one is used for validation and test."""


def get_template(task: str, name: str) -> Template:
    """The template of a task by name; KeyError if there is none."""
    return {t.name: t for t in TEMPLATES[task]}[name]
