"""Where the rows of the seven tasks come from: the hub's splits, local files, and what is missing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.helpers.language import HUB_ROWS, write_rows

from actmat.errors import CheckpointError
from actmat_experiments.language import sources
from actmat_experiments.language.sources import N_VALIDATION, SOURCES, Source, from_hub, load_rows_file, load_tasks

TEXT_OF = {
    "qasc": "question",
    "wikiqa": "question",
    "quartz": "question",
    "paws": "sentence1",
    "story_cloze": "input_sentence_1",
    "winogrande": "sentence",
    "wsc": "text",
}


def numbered(task: str, split: str, n: int = 40) -> list[dict]:
    """Rows of the hub's schema that can be told apart."""
    column = TEXT_OF[task]
    return [{**HUB_ROWS[task], column: f"{HUB_ROWS[task][column]} {split} {k}"} for k in range(n)]


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


def write_story_cloze(folder: Path) -> None:
    write_rows(folder / "story_cloze.validation.jsonl", numbered("story_cloze", "validation"))
    write_rows(folder / "story_cloze.test.jsonl", numbered("story_cloze", "test", 37))


def test_local_files_come_before_the_hub_under_usual_names(tmp_path: Path) -> None:
    write_story_cloze(tmp_path)
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
