"""Rows and templates of the seven tasks: real rows, the hub's schemas, and what must not pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.language import HUB_ROWS

from actmat.errors import CheckpointError
from actmat_experiments.language.questions import Row, read_rows, to_items
from actmat_experiments.language.sources import load_rows_file

DATA = Path(__file__).parent / "data"
TARGETS = {
    "qasc": "ice",
    "wikiqa": "Yes",
    "quartz": "more",
    "paws": "No",
    "story_cloze": "Tom ate the slice.",
    "winogrande": "trophy",
    "wsc": "No",
}
CSV_STORY = {
    "InputStoryid": "s1",
    **{f"InputSentence{n}": HUB_ROWS["story_cloze"][f"input_sentence_{n}"] for n in range(1, 5)},
    "RandomFifthSentenceQuiz1": "Tom went to sleep hungry.",
    "RandomFifthSentenceQuiz2": "Tom ate the slice.",
    "AnswerRightEnding": "2",
}

PAPERS = {
    "qasc": (
        "Frozen water is ice, and heat melts frozen water. Given these facts, what melts among the following options:\n"
        "- iron\n - ice\n - sand\n - wood\n - wool\n - salt\n - soil\n - air"
    ),
    "wikiqa": (
        "Question: how are glacier caves formed??\n"
        'Would "A glacier cave is a cave formed within the ice of a glacier ." be a reasonable answer?'
    ),
    "quartz": (
        "Use information from the paragraph to answer the question.\n\nQuestion:\n\n\n"
        "A bigger star gives how much light more or less? \n\n\n"
        "Paragraph :\n\nThe bigger a star, the more light it gives."
    ),
    "paws": (
        "Determine if the following two sentences paraphrase each other or not.\n"
        "Sent 1: He sold the car to her.\nSent 2: She sold him the car."
    ),
    "story_cloze": (
        "Tom was hungry. He went to the kitchen. There was bread. He cut a slice. What is a possible continuation for "
        "the story given the following options ? - Tom went to sleep hungry.\n- Tom ate the slice."
    ),
    "winogrande": (
        "The trophy did not fit the case because the _ was too big. In the previous sentence, does _ refer to trophy "
        "or  case?"
    ),
    "wsc": (
        "Mark told Pete many lies, which Pete included in his book. In the previous sentence, does the pronoun "
        '"his" refer to Mark? Yes or no?'
    ),
}
"""Rows of `HUB_ROWS` as promptsource renders them by its first template."""


def wrong(task: str, *rows: dict) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_rows(task, rows, "somewhere")
    assert "somewhere" in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("qasc.dev.jsonl", "local weather conditions"),
        ("winogrande.dev.jsonl", "Maria"),
        ("wsc.val.jsonl", "No"),
    ],
)
def test_real_rows_are_read(file: str, first: str) -> None:
    task = file.split(".")[0]
    items = to_items(task, read_rows(task, load_rows_file(DATA / file), file)[0])
    assert len(items) == 3
    assert items[0].target == first
    assert {len(item.choices) for item in items} == {8 if task == "qasc" else 2}


def test_both_csv_files_of_story_cloze_and_the_hub_say_the_same() -> None:
    paper = {
        "input_storyid": "s1",
        **{f"input_sentence{n}": HUB_ROWS["story_cloze"][f"input_sentence_{n}"] for n in range(1, 5)},
        "random_fifth_sentence_quiz1": "Tom went to sleep hungry.",
        "random_fifth_sentence_quiz2": "Tom ate the slice.",
        "answer_right_ending": "2",
    }
    read = [read_rows("story_cloze", [row], "x") for row in (CSV_STORY, paper, HUB_ROWS["story_cloze"])]
    assert read[0] == read[1] == read[2]


@pytest.mark.parametrize("task", PAPERS)
def test_the_papers_templates_ask_as_its_code_does(task: str) -> None:
    (item,) = to_items(task, read_rows(task, [HUB_ROWS[task]], task)[0])
    assert (item.prompt, item.target) == (PAPERS[task], TARGETS[task])


def test_malformed_rows_are_left_out_and_counted_one_in_a_hundred_at_most() -> None:
    good, bad = HUB_ROWS["paws"], {**HUB_ROWS["paws"], "sentence1": " "}
    rows, malformed = read_rows("paws", [*[good] * 99, bad], "paws, train")
    assert len(rows) == 99
    assert malformed == ["paws, train, row 100: sentence1 is ' ', not a text"]
    with pytest.raises(CheckpointError, match="2 of 100 rows cannot be used; at most 1 % may be"):
        read_rows("paws", [*[good] * 98, bad, bad], "paws, train")


def test_braces_in_a_row_are_text() -> None:
    row = {**HUB_ROWS["paws"], "sentence1": "a {sentence2} b", "sentence2": "{0.__class__}"}
    (item,) = to_items("paws", read_rows("paws", [row], "x")[0])
    assert "a {sentence2} b" in item.prompt
    assert "{0.__class__}" in item.prompt
    ((row,), _) = read_rows("winogrande", [{**HUB_ROWS["winogrande"], "option1": " trophy "}], "x")
    assert row == Row(row.fields, ("trophy", "case"), 0), "spaces around texts go"


def test_wrong_column_names_are_an_error_and_no_empty_choices() -> None:
    row = {k.replace("sentence_quiz", "sentence_quiz_"): v for k, v in HUB_ROWS["story_cloze"].items()}
    text = str(wrong("story_cloze", row, row))
    assert "missing sentence_quiz1, sentence_quiz2" in text
    assert "Did you mean 'sentence_quiz_1'?" in text
    assert "missing InputSentence1" in text  # the other form
    assert "row 2" not in text


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("story_cloze", {"sentence_quiz1": " "}, "answer 1 is ' ', not a text"),
        ("story_cloze", {"sentence_quiz2": None}, "answer 2 is None"),
        ("story_cloze", {"sentence_quiz2": " Tom went to sleep hungry."}, "not distinct"),
        ("story_cloze", {"answer_right_ending": 3}, "answer_right_ending is 3"),
        ("story_cloze", {"input_sentence_1": 7}, "row 1: story is 7"),
        ("winogrande", {"answer": ""}, "answer is ''"),
        ("wsc", {"label": -1}, "label is -1"),
        ("wsc", {"span2_text": ""}, "pronoun is ''"),
        ("qasc", {"answerKey": ""}, "answerKey is ''"),
        ("qasc", {"choices": {"text": ["a"], "label": ["A", "B"]}}, "1 texts and 2 labels"),
        ("paws", {"label": 2}, "label is 2"),
    ],
)
def test_unusable_values_are_named(task: str, change: dict, message: str) -> None:
    assert message in str(wrong(task, {**HUB_ROWS[task], **change}))


def test_all_problems_of_a_source_come_at_once() -> None:
    good = HUB_ROWS["wsc"]
    error = wrong("wsc", {**good, "label": -1}, good, {**good, "text": ""})
    assert [p.split(":")[0] for p in error.problems] == ["row 1", "row 3"]
    assert wrong("wsc").problems == ("the data set has no rows",)
