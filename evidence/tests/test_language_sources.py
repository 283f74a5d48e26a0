"""Rows and templates of the seven tasks: where they come from, real rows, and what must not pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from evidence.tests.helpers.language import HUB_ROWS, numbered, write_rows

from actmat.errors import CheckpointError
from actmat_experiments.language import sources
from actmat_experiments.language.questions import Row, read_rows, to_items
from actmat_experiments.language.sources import N_VALIDATION, SOURCES, Source, from_hub, load_rows_file, load_tasks

# Where the rows of the seven tasks come from: the hub's splits, local files, and what is missing.


def hub(source: Source) -> dict[str, list[dict]]:
    return {split: numbered(source.task, split) for split in source.splits}


def test_tasks_of_the_hub_have_disjoint_parts() -> None:
    names = [name for name in SOURCES if name != "story_cloze"]
    for task in load_tasks(names, None, fetch=hub):
        source = SOURCES[task.name]
        parts = [{i.prompt for i in part} for part in (task.train, task.validation, task.test)]
        assert sum(map(len, parts)) == len(set.union(*parts))
        assert all(f" {source.test} " in i.prompt for i in task.test)
        assert all(f" {source.train} " in i.prompt for i in task.train)
        assert len(task.validation) == (N_VALIDATION if source.validation is None else 40)
        assert len(task.test) == (40 - N_VALIDATION if source.validation is None else 40)
        assert task.majority == (len(task.test), len(task.test))


def test_the_validation_rows_are_those_that_the_papers_code_takes_from_the_test_split() -> None:
    first, again = (load_tasks(["wsc"], None, fetch=hub)[0] for _ in range(2))
    assert first == again
    with pytest.raises(CheckpointError, match="more than 32"):
        load_tasks(["wsc"], None, fetch=lambda source: {s: numbered("wsc", s, 32) for s in source.splits})
    assert first.key("train", "test") == again.key("train", "test")
    assert (len(first.train), len(first.test)) == (40, 40 - N_VALIDATION)
    rows = list(range(40))
    random.Random(42).shuffle(rows)
    assert [i.prompt.split("validation ")[1].split(" ")[0] for i in first.validation] == [str(n) for n in rows[:32]]


def test_the_hub_test_of_tasks_without_labels_there_is_not_touched() -> None:
    asked = []

    def fetch(source: Source) -> dict[str, list[dict]]:
        asked.extend((source.task, split) for split in source.splits)
        return hub(source)

    load_tasks(["qasc", "winogrande", "wsc", "paws"], None, fetch=fetch)
    assert ("paws", "test") in asked
    assert not {("qasc", "test"), ("winogrande", "test"), ("wsc", "test")} & set(asked)


def test_local_files_come_before_the_hub_under_usual_names(tmp_path: Path) -> None:
    write_rows(tmp_path / "story_cloze.validation.jsonl", numbered("story_cloze", "validation"))
    write_rows(tmp_path / "story_cloze.test.jsonl", numbered("story_cloze", "test", 37))
    for split in ("train", "dev", "test"):
        write_rows(tmp_path / f"wikiqa.{split}.jsonl", numbered("wikiqa", f"local {split}"))
    story, wiki, wsc = load_tasks(["story_cloze", "wikiqa", "wsc"], tmp_path, fetch=hub)
    assert (len(story.train), len(story.validation), len(story.test)) == (40, 32, 5)
    assert all("local dev" in i.prompt for i in wiki.validation)
    assert all("local" not in i.prompt for i in wsc.train)


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "qasc.dev.jsonl", numbered("qasc", "dev"))
    write_rows(tmp_path / "paws.train.jsonl", [{"a": 1}])

    def nothing(source: Source) -> dict[str, list[dict]]:
        raise CheckpointError("the hub cannot be reached")

    with pytest.raises(CheckpointError) as caught:
        load_tasks(["qasc", "story_cloze", "wikiqa", "paws"], tmp_path, fetch=nothing)
    text = str(caught.value)
    assert "qasc.train.jsonl is not there" in text
    assert "story_cloze is not on the hub" in text
    assert "story_cloze.validation.jsonl, story_cloze.test.jsonl" in text
    assert "the hub cannot be reached" in text
    assert "paws.validation.jsonl is not there" in text


def test_csv_files_and_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "story_cloze.validation.csv"
    path.write_text('\ufeffa,b\n"x, y",2\n', encoding="utf-8")
    assert load_rows_file(path) == [{"a": "x, y", "b": "2"}]
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "\x85"}\n\n[1]\n{\n', encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        load_rows_file(path)
    assert [p.split(":")[0] for p in caught.value.problems] == ["line 3", "line 4"]


def test_the_library_datasets_reads_rows_with_the_hubs_schema(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "qasc"
    folder.mkdir()
    write_rows(folder / "train.jsonl", numbered("qasc", "train", 36))
    write_rows(folder / "validation.jsonl", numbered("qasc", "validation", 35))
    local = Source("qasc", (str(folder), None), test="validation", validation=None)
    monkeypatch.setitem(sources.SOURCES, "qasc", local)
    (task,) = load_tasks(["qasc"], None)
    assert (len(task.train), len(task.test)) == (36, 3)
    assert task.test[0].target == "ice"
    with pytest.raises(CheckpointError, match=r"nowhere.*--data"):
        from_hub(Source("qasc", (str(tmp_path / "nowhere"), None)))


# Rows and templates of the seven tasks: real rows, the hub's schemas, and what must not pass.


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
