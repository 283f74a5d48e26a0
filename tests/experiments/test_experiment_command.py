"""`actmat experiment`: what it says before anything heavy begins."""

from __future__ import annotations

import json

import pytest
from tests.helpers.vision import TINY, write_tasks
from typer.testing import CliRunner

from actmat.cli.main import app
from actmat.errors import RecipeError
from actmat_experiments.suites import SUITES

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
    flags = ["--data", str(data), "--tasks", "a,b", "--methods", "average,actmat", "--threads", "1", *settings]
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
    assert {s["method"] for s in data["scores"]} >= {"average", "actmat", "base", "experts"}
    assert call("table", "vision-small", *place, "--quiet").stdout == ""
    assert (tmp_path / "cache" / "logs" / "merges.log").read_text().count("begin") == 1
