"""Scores on disk, tables of them, and what `actmat experiment` says before anything heavy begins."""

from __future__ import annotations

import json
from functools import partial

import pytest
from evidence.tests.helpers.analyses import TINY as TINY_DEMO
from evidence.tests.helpers.terminal import console_text
from evidence.tests.helpers.vision import TINY, write_tasks
from typer.testing import CliRunner

from actmat.cli.main import app
from actmat.errors import CheckpointError, RecipeError
from actmat.extras.demo.run import run_demo
from actmat_experiments import quick
from actmat_experiments.harness.results import Score, append_scores, majority_share, read_scores
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.table import average_table, markdown_table, over_tasks, summarize, task_table
from actmat_experiments.suites import SUITES
from actmat_experiments.vision.small import SmallSettings

# Scores, intervals over tasks and seeds, and tables.


TASKS = ("a", "b")


def score(method: str, task: str, correct: float, *, seed: int = 0, scale: str = "default", **more) -> Score:
    return Score("s", "full", method, scale, task, seed, correct, 100, **more)


def some_scores() -> list[Score]:
    rows = {"experts": (80, 60), "base": (40, 30), "majority": (10, 20), "actmat": (72, 54), "average": (60, 45)}
    found = [score(m, t, right) for m, counts in rows.items() for t, right in zip(TASKS, counts, strict=True)]
    return found + [score("actmat", t, 76, scale="tuned", detail={"scale": 0.5}) for t in TASKS]


def test_scores_come_back_and_later_ones_replace_earlier_ones(tmp_path):
    path = tmp_path / "scores" / "s.jsonl"
    append_scores(path, [score("actmat", "a", 1), score("actmat", "b", 2)])
    append_scores(path, [score("actmat", "a", 3), score("actmat", "a", 4, settings="other")])
    assert [(s.task, s.correct, s.settings) for s in read_scores(path)] == [
        ("a", 3, ""),
        ("b", 2, ""),
        ("a", 4, "other"),
    ]
    assert read_scores(tmp_path / "nothing") == []


def test_a_line_without_its_end_is_passed_over_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "s.jsonl"
    append_scores(path, [score("actmat", "a", 1)])
    with path.open("a") as file:
        file.write('{"suite": "s", "reg')
    assert len(read_scores(path)) == 1
    with path.open("a") as file:
        file.write('\n{"suite": "s"}\n')
    with pytest.raises(CheckpointError, match=r"s\.jsonl:2") as caught:
        read_scores(path)
    assert len(caught.value.problems) == 2


def test_the_interval_of_one_seed_is_that_of_the_test_items():
    found = over_tasks([[0.5, 0.9]], [100, 400])
    v = (0.5 * 0.5 / 100 + 0.9 * 0.1 / 400) / 4
    assert found.value == pytest.approx(0.7)
    assert found.high - found.value == pytest.approx(1.959963984540054 * v**0.5)


def test_seeds_that_differ_widen_the_interval():
    same, apart = over_tasks([[0.5], [0.5]], [100]), over_tasks([[0.4], [0.6]], [100])
    v_seed = 0.02 / 2  # s^2 = 2 * 0.1^2, over two seeds
    expected = 1.959963984540054 * (0.25 / 100 + v_seed) ** 0.5
    assert apart.half == pytest.approx(expected)
    assert apart.half > same.half == pytest.approx(1.959963984540054 * 0.05)


def test_lines_are_normalized_by_the_expert_and_ordered():
    lines = summarize(some_scores(), TASKS, {("actmat", "default"): 70.0})
    assert [(x.method, x.scale) for x in lines] == [
        *(("majority", "default"), ("base", "default"), ("experts", "default")),
        *(("actmat", "default"), ("actmat", "tuned"), ("average", "default")),
    ]
    actmat = lines[3]
    assert actmat.normalized == pytest.approx((72 / 80 + 54 / 60) / 2)
    assert actmat.average.value == pytest.approx(0.63)
    assert actmat.paper == pytest.approx(0.7)
    assert lines[4].scales == [0.5]
    assert lines[5].paper is None


def test_seeds_are_averaged_and_incomplete_ones_left_out():
    counts = {0: (50, 70), 1: (70, 90)}
    scores = [score("average", t, counts[s][i], seed=s) for s in counts for i, t in enumerate(TASKS)]
    (line,) = summarize([*scores, score("average", "a", 0, seed=2)], TASKS)
    assert line.seeds == {0: 0.6, 1: 0.8}
    assert line.average.value == pytest.approx(0.7)
    assert line.tasks["a"].value == pytest.approx(0.6)
    assert line.normalized is None


def test_tables_fit_eighty_columns():
    tasks = ("mnist", "eurosat", "gtsrb", "dtd", "sign_digits", "resisc45", "cifar10", "svhn")
    rows = ("majority", "base", "experts", "task_arithmetic", "knots_iso_c")
    scores = [score(m, t, 50) for m in rows for t in tasks] + [
        score("knots_iso_c", t, 60, scale="tuned", detail={"scale": 1.5}) for t in tasks
    ]
    lines = summarize(scores, tasks, {("knots_iso_c", "default"): 74.9})
    for table in (average_table("t", lines), task_table("t", lines, tasks)):
        text = console_text(table)
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        assert all(row in text for row in rows)
    row = next(line for line in console_text(average_table("t", lines)).splitlines() if "knots" in line)
    assert row.split() == ["knots_iso_c", "50.0", "±3.5", "100.0", "74.9", "60.0", "±3.4", "1.5"]


def test_markdown_holds_everything():
    text = markdown_table(summarize(some_scores(), TASKS, {("actmat", "tuned"): 70.0}), TASKS)
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in text.splitlines()]
    assert rows[0] == ["method", "scale", "average", "of expert", "paper", "a", "b"]
    assert rows[6] == ["`actmat`", "tuned: 0.5", "76.0 ±5.9", "110.8", "70.0", "76.0", "76.0"]
    assert len({len(row) for row in rows}) == 1


def test_settings_are_changed_by_text_of_their_type():
    found = changed(SmallSettings(), {"train": "7", "rate": "1e-3"})
    assert (found.train, found.rate, found.epochs) == (7, 1e-3, SmallSettings().epochs)
    with pytest.raises(RecipeError) as caught:
        changed(SmallSettings(), {"epoch": "3", "train": "many"})
    assert "Did you mean 'epochs'" in caught.value.problems[0]
    assert "'train' cannot be 'many'" in caught.value.problems[1]


def test_the_majority_is_that_of_the_training_answers():
    assert majority_share([2, 2, 1], [1, 2, 2, 0]) == (2, 4)
    assert majority_share([3, 1], [1, 3, 3]) == (1, 3)  # the smallest of equals


# `actmat experiment`: what it says before anything heavy begins.


runner = CliRunner()


def call(*arguments: str):
    return runner.invoke(app, ["experiment", *arguments])


def test_suites_are_listed():
    done = call("list")
    assert done.exit_code == 0
    table = done.stdout.split("\n\n")[0]
    head, *firsts = [line.split()[0] for line in table.splitlines() if line and not line.startswith(" ")]
    assert (head, firsts) == ("suite", [s.name for s in SUITES]), "a long summary goes on below itself"
    assert max(map(len, done.stdout.splitlines())) <= 80
    listed = json.loads(call("list", "--json").stdout)
    assert listed["schema"] == "actmat.experiment/1"
    assert [s["name"] for s in listed["suites"]] == firsts
    times = {s["name"]: s["time"] for s in listed["suites"]}
    assert all(("processor" in t or "NVIDIA" in t) and "20" in t for t in times.values() if t != "not measured here")
    assert " ".join(table.split()).count("Time: ") == len(SUITES)
    assert call("list", "-q").stdout == ""


def test_exit_codes(tmp_path):
    """As the page lists them: 1 for a cache without scores, also with --json; 2 for flags that exclude each other."""
    place = ("vision-small", "--cache", str(tmp_path))
    with pytest.raises(RecipeError, match="holds no scores"):
        raise call("table", *place, "--json").exception
    assert call("table", *place, "--json", "--markdown").exit_code == 2


def test_an_unknown_suite_offers_the_near_name(tmp_path):
    done = call("run", "vision-smal", "--cache", str(tmp_path))
    assert isinstance(done.exception, RecipeError)
    assert "Did you mean 'vision-small'" in str(done.exception)


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--seeds", "0,x"], "whole numbers"), (["--no-full"], "--lora"), (["--set", "epochs"], "name=value")],
)
def test_wrong_flags_are_errors_of_usage(flags, said):
    done = call("run", "vision-small", *flags)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_run_ends_with_its_table_and_the_table_can_be_had_again(tmp_path):
    data = write_tasks(tmp_path / "data", ("cifar100", "a", "b"))
    settings = [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
    place = ["--cache", str(tmp_path / "cache")]
    (tmp_path / "mine.py").write_text("def first(deltas):\n    return deltas[0]\n")
    methods = f"average,actmat,{tmp_path / 'mine.py'}:first"
    flags = ["--data", str(data), "--tasks", "a,b", "--methods", methods, "--threads", "1", *settings]
    done = call("run", "vision-small", *place, *flags)
    assert done.exit_code == 0, done.output
    assert "actmat" in done.stdout
    again = call("table", "vision-small", *place, "--markdown")
    assert again.exit_code == 0
    assert "| `average` | default |" in again.stdout
    data = json.loads(call("table", "vision-small", *place, "--json").stdout)
    assert set(data) == {"schema", "suite", "scores"}
    fields = "suite model regime method scale task seed correct total settings detail"
    assert all(set(score) == set(fields.split()) for score in data["scores"])
    assert {s["method"] for s in data["scores"]} >= {"average", "actmat", "first", "base", "experts"}
    assert call("table", "vision-small", *place, "--quiet").stdout == ""
    assert (tmp_path / "cache" / "logs" / "merges.log").read_text().count("begin") == 1


def test_the_quick_suite_compares_a_method_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "run_demo", partial(run_demo, settings=TINY_DEMO))
    method = tmp_path / "mine.py"
    method.write_text("def first(deltas):\n    return deltas[0]\n")
    place = ["--cache", str(tmp_path / "cache")]
    done = call("run", "quick", *place, "--methods", f"average,{method}:first", "--seeds", "0,1")
    assert done.exit_code == 0, done.output
    assert [line.strip()[-6:] for line in done.stdout.splitlines() if "photographs" in line] == ["seed 0", "seed 1"]
    rows = {line.split()[0] for line in done.stdout.splitlines() if " ±" in line}
    assert sorted(rows) == ["average", "base", "experts", "first", "majority"]
    assert call("run", "quick", *place, "--lora").exit_code == 1
