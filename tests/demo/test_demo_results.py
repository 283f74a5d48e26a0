"""Intervals, rows, tables, and the folder they are kept in."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.helpers.demo import made_up_result

from actmat.errors import OutputError
from actmat.extras.demo.heads import majority_correct
from actmat.extras.demo.merging import claim_folder
from actmat.extras.demo.results import (
    accuracy_table,
    drop_table,
    mean_interval,
    next_command,
    score_row,
    wilson_interval,
)
from actmat.extras.demo.tasks import Examples

AVERAGES = {"majority": 0.2, "base": 0.7, "experts": 0.8, "average": 0.74, "actmat": 0.76, "task_arithmetic": 0.65}


def test_wilson_interval_is_the_set_of_shares_that_the_count_does_not_reject():
    found = wilson_interval(83, 100)
    for end in (found.low, found.high):  # |p - q| = z sqrt(q (1 - q) / n) at both ends
        assert abs(0.83 - end) == pytest.approx(1.959963984540054 * (end * (1 - end) / 100) ** 0.5)
    assert found.low < found.value == 0.83 < found.high


@pytest.mark.parametrize("n_right", [0, 20])
def test_wilson_interval_stays_between_zero_and_one(n_right):
    found = wilson_interval(n_right, 20)
    assert 0 <= found.low < found.high <= 1
    assert found.high - found.low > 0.1


def test_the_average_is_judged_by_photograph():
    right = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 1]] * 3).bool()  # three tasks that agree say no more than one
    found, alone = mean_interval(right), mean_interval(right[:1])
    assert (found.value, found.low, found.high) == pytest.approx((alone.value, alone.low, alone.high))
    half = 1.959963984540054 * right[0].double().std() / 8**0.5
    assert found.value == 0.625
    assert found.high - found.value == pytest.approx(float(half))


def test_the_majority_is_that_of_the_training_examples():
    images = torch.zeros(5, 8, 8)
    train, test = Examples(images, torch.tensor([2, 2, 1, 0, 2])), Examples(images, torch.tensor([1, 1, 1, 2, 0]))
    assert majority_correct(train, test, 3).tolist() == [False, False, False, True, False]


def test_a_row_compares_with_the_expert_of_the_task():
    expert = {"a": torch.tensor([1, 1, 1, 1]).bool(), "b": torch.tensor([1, 1, 0, 0]).bool()}
    right = {"a": torch.tensor([1, 1, 0, 1]).bool(), "b": torch.tensor([1, 1, 1, 0]).bool()}
    row = score_row("x", "merged", right, expert)
    assert row.drops == {"a": 0.25, "b": -0.25}
    assert row.normalised == pytest.approx((0.75 / 1 + 0.75 / 0.5) / 2)
    assert row.average.value == 0.75
    own = score_row("experts", "expert", expert, expert)
    assert own.normalised == 1
    assert set(own.drops.values()) == {0}


def printed(table, width=80):
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_tables_fit_eighty_columns_uncut():
    result = made_up_result(AVERAGES)
    for table in (accuracy_table(result), drop_table(result)):
        lines = printed(table)
        assert max(map(len, lines)) <= 80
        text = "\n".join(lines)
        assert "…" not in text
        assert all(
            name in text for name in ("task_arithmetic", "digit", "parity", "large", "jumbled", "turned", "mod3")
        )


def test_methods_stand_below_the_references_best_first():
    lines = printed(accuracy_table(made_up_result(AVERAGES)))
    names = [line.split()[0] for line in lines if line.strip() and line.split()[0] in AVERAGES]
    assert names == ["majority", "base", "experts", "actmat", "average", "task_arithmetic"]
    [line] = [line for line in lines if line.split()[:1] == ["actmat"]]
    assert line.split() == ["actmat", *["76.0"] * 6, "76.0", "±1.0", "95.0"]


def test_drops_name_the_worst_task_and_leave_out_experts():
    lines = printed(drop_table(made_up_result(AVERAGES)))
    starts = [line.split()[0] for line in lines if line.strip()]
    assert "experts" not in starts
    assert "majority" not in starts
    [line] = [line for line in lines if line.split()[:1] == ["base"]]
    assert line.split() == ["base", *["10.0"] * 7]


def test_the_command_survives_a_shell():
    command = next_command(Path("my demo/base"), [Path("my demo/experts/a"), Path("my demo/experts/b")])
    assert shlex.split(command.replace("\\\n", "")) == [
        *("actmat", "merge", "--base", "my demo/base"),
        *("--expert", "my demo/experts/a", "--expert", "my demo/experts/b"),
        *("--method", "actmat", "--out", "my-merge"),
    ]


def test_results_are_plain_data():
    result = made_up_result(AVERAGES)
    found = json.loads(json.dumps(result.to_json()))
    assert found["seed"] == 3
    assert found["rows"][4]["name"] == "actmat"
    assert found["rows"][4]["tasks"]["digit"] == {"value": 0.76, "low": 0.74, "high": 0.78}
    assert result.row("actmat").average.value == 0.76
    with pytest.raises(KeyError):
        result.row("nothing")


def test_a_new_or_empty_folder_is_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "empty", tmp_path / "new" / "deep"):
        claim_folder(root, ["digit"], overwrite=False)
        with pytest.raises(OutputError, match="--overwrite"):
            claim_folder(root, ["digit"], overwrite=False)


def test_overwriting_removes_what_the_demo_made_and_nothing_else(tmp_path):
    folder = claim_folder(tmp_path, ["digit"], overwrite=False)
    for made in (folder.base, folder.expert("digit"), folder.merged("ties"), tmp_path / "my-notes"):
        made.mkdir(parents=True)
    folder.heads.touch()
    folder.results.touch()
    for mine in (folder.expert("mine"), folder.merged("my-merge")):
        mine.mkdir()
        with pytest.raises(OutputError, match="no demo wrote") as refused:
            claim_folder(tmp_path, ["digit"], overwrite=True)
        assert refused.value.problems == (str(mine),)
        mine.rmdir()
    claim_folder(tmp_path, ["digit"], overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".actmat-demo", "my-notes"]


def test_a_foreign_folder_is_left_alone_even_with_overwrite(tmp_path):
    (tmp_path / "base").mkdir()
    with pytest.raises(OutputError, match="not made by the demo"):
        claim_folder(tmp_path, ["digit"], overwrite=True)
    assert (tmp_path / "base").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file"):
        claim_folder(tmp_path / "file", ["digit"], overwrite=True)
    with pytest.raises(OutputError, match="cannot be written"):
        claim_folder(tmp_path / "file" / "below", ["digit"], overwrite=False)
