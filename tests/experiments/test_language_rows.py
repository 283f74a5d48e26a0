"""Rows and templates of the seven tasks: real rows, the hub's schemas, and what must not pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.language import HUB_ROWS

from actmat.errors import CheckpointError
from actmat_experiments.language.questions import (
    FORMS,
    TEMPLATES,
    Row,
    Template,
    get_template,
    read_rows,
    render,
    to_items,
)
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


def wrong(task: str, *rows: dict) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_rows(task, rows, "somewhere")
    assert "somewhere" in str(caught.value)
    return caught.value


def test_every_task_has_rows_and_templates() -> None:
    assert list(FORMS) == list(TEMPLATES) == list(HUB_ROWS)


@pytest.mark.parametrize(("task", "template"), [(t, x) for t, some in TEMPLATES.items() for x in some])
def test_a_row_of_the_hub_is_asked_by_every_template(task: str, template: Template) -> None:
    (row,) = read_rows(task, [HUB_ROWS[task]], task)
    item = render(template, row)
    assert item.target == TARGETS[task]
    assert len(item.choices) >= 2
    assert all(choice.strip() for choice in item.choices)
    assert len(set(item.choices)) == len(item.choices)
    for text in row.fields.values():  # what a template mentions is there, whole
        assert text in item.prompt or not {n for n, t in row.fields.items() if t == text} & template.fields
    for option in row.options:
        assert option in item.prompt
    assert "{" not in item.prompt


@pytest.mark.parametrize("task", TEMPLATES)
def test_templates_mention_known_fields_and_have_names_of_their_own(task: str) -> None:
    (row,) = read_rows(task, [HUB_ROWS[task]], task)
    templates = TEMPLATES[task]
    assert len({t.name for t in templates}) == len({t.prompt for t in templates}) == len(templates)
    for template in templates:
        assert template.fields <= {*row.fields, "options"}
        assert bool(template.answers) is not bool(row.options)
        assert get_template(task, template.name) is template


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
    items = to_items(task, read_rows(task, load_rows_file(DATA / file), file), cycle=False)
    assert len(items) == 3
    assert items[0].target == first
    assert {len(item.choices) for item in items} == {8 if task == "qasc" else 2}


def test_the_authors_csv_of_story_cloze_and_the_hub_say_the_same() -> None:
    assert read_rows("story_cloze", [CSV_STORY], "csv") == read_rows("story_cloze", [HUB_ROWS["story_cloze"]], "hub")


def test_templates_go_round_in_training_and_stand_still_in_tests() -> None:
    rows = read_rows("paws", [HUB_ROWS["paws"]] * 4, "paws")
    assert len({item.prompt for item in to_items("paws", rows, cycle=True)}) == 3
    assert len({item.prompt for item in to_items("paws", rows, cycle=False)}) == 1


def test_braces_in_a_row_are_text() -> None:
    row = {**HUB_ROWS["paws"], "sentence1": "a {sentence2} b", "sentence2": "{0.__class__}"}
    (item,) = to_items("paws", read_rows("paws", [row], "x"), cycle=False)
    assert "a {sentence2} b" in item.prompt
    assert "{0.__class__}" in item.prompt


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
        ("story_cloze", {"answer_right_ending": 3}, "answer_right_ending is '3'"),
        ("story_cloze", {"input_sentence_1": 7}, "row 1"),
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
    assert wrong("wsc").problems == ("there are no rows",)


def test_spaces_around_texts_go() -> None:
    (row,) = read_rows("winogrande", [{**HUB_ROWS["winogrande"], "option1": " trophy "}], "x")
    assert row == Row(row.fields, ("trophy", "case"), 0)
