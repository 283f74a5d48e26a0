"""The study of merges without data: one toy subject from end to end, and the tables from rows that are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.datafree import measure as measuring
from benchmarks.datafree.judged import near_rows, verdict
from benchmarks.datafree.picks import differences, found, least_noise, least_of_all, pooled, read_rows
from benchmarks.datafree.tables import TABLES
from tests.house.test_benchmark_tune import TASKS, toy


def test_a_subject_is_measured_from_end_to_end(tmp_path: Path) -> None:
    subject = toy(tmp_path)
    start = torch.zeros(2, 6)
    factors = {("up_proj.weight", 0): (torch.zeros(8, 2), torch.ones(2, 6), start)}
    row = measuring.measure(dataclasses.replace(subject, factors=lambda task: factors))
    assert row["own"] == dict.fromkeys(TASKS, 1.0)
    rules = {m["rule"] for m in row["rows"] if m["length"] == "one"}
    assert {"average", "actmat", "delta, 0.5", "noise, left out", "inputs, 0.9", "movement of A, 0.5"} <= rules
    assert 0.9 < row["alignment"]["inputs"] <= 1.0, "the measured Gram matrix with itself"
    assert row["alignment"]["noise"] > 0.8, "the noise of this toy is as its inputs are"
    for rule in measuring.LENGTHENED:
        lengths = [m["length"] for m in row["rows"] if m["rule"] == rule]
        assert lengths.count("fixed") == len(measuring.SCALES)
        assert set(lengths) == {*measuring.LENGTHS, "fixed"}
    again = found(row, "average", "projection")
    assert again["scale"] == 1.0, "rounded"
    assert again["test"] == found(row, "average")["test"]


def test_without_factors_there_are_no_estimates_of_adapters(tmp_path: Path) -> None:
    row = measuring.measure(toy(tmp_path), most=3)
    assert [m["rule"] for m in row["rows"] if m["length"] == "one"] == list(measuring.METHODS[:3])
    assert "movement of A" not in row["alignment"]


def row(suite: str, regime: str, seed: int, values: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Rules with their accuracies on two tasks; on noise the later ones diverge less."""
    rows = [
        {"rule": rule, "length": "one", "scale": 1.0, "test": {"a": a, "b": b}, "noise": 1.0 - 0.1 * n}
        for n, (rule, (a, b)) in enumerate(values.items())
    ]
    for length, points in (("half way", 0.004), ("projection", 0.0), ("fixed", 0.05)):
        a, b = values["average"]
        test = {"a": a + points, "b": b + points}
        rows.append({"rule": "average", "length": length, "scale": 2.0, "test": test, "noise": 2.0 - points})
    ones = {"a": 1.0, "b": 0.8}
    return {
        "subject": f"{suite}/{regime}/{seed}", "suite": suite, "regime": regime, "seed": seed, "tasks": ["a", "b"],
        "own": ones, "base": {"a": 0.5, "b": 0.5},
        "alignment": {"delta": 0.1 * (1 + seed), "inputs": 1.0, "identity": 0.4},
        "rows": rows, "machine": "m", "date": "d",
    }  # fmt: skip


def rows(good: float) -> list[dict[str, Any]]:
    """A rule that gains `good` wherever it is confirmed, and much where it was chosen."""
    made = []
    for suite, seed in (("digits", 0), ("digits", 1), ("vision-vits14", 0)):
        for regime in ("full", "lora"):
            gain = 0.2 if (suite, seed) == ("digits", 0) else good
            values = {
                "average": (0.7, 0.6),
                "actmat": (0.69, 0.59),
                "tsv": (0.69, 0.6),
                "new": (0.7 + gain, 0.6 + gain),
            }
            made.append(row(suite, regime, seed, values | {"inputs, 0.9": (0.9, 0.9)}))
    return made


def test_differences_are_paired_by_task_and_the_worst_subject_is_named() -> None:
    two = [
        row("digits", "lora", seed, {"average": (0.7, 0.6), "new": (0.7 + g, 0.63)})
        for seed, g in ((1, 0.01), (2, -0.05))
    ]
    assert differences(two[0], lambda r: found(r, "new"), lambda r: found(r, "average")) == pytest.approx([1, 3])
    centre, half, worst = pooled(two, lambda r: found(r, "new"))
    assert (centre, worst) == (pytest.approx(0.5), pytest.approx(-1))
    assert round(half, 3) == 6.024, "Student's, of 1, 3, -5 and 3"


def test_tables_hold_what_their_heads_name() -> None:
    every = rows(0.02)
    for name, (header, made) in TABLES.items():
        lines = made(every)
        assert lines, name
        assert {len(line) for line in lines} == {len(header(every))}, name
    lora = {line[0]: line[1:] for line in TABLES["lora"][1](every)}
    assert lora["`new`"] == ["+20.0 ±0.0", "+20.0", *["+2.0 ±0.0", "+2.0"] * 2, *[""] * 4]
    assert lora["*inputs, 0.9* (sees data)"][2] == "+25.0 ±63.5"
    assert TABLES["subjects"][1](every)[0] == ["digits, full", "0, 1", "2", "50.0", "65.0", "90.0"]
    assert TABLES["alignment"][1](every)[0] == ["identity", "0.40", "0.40", "0.40", "0.40"]
    assert TABLES["alignment"][1](every)[1][:2] == ["delta", "0.15"]


def test_noise_chooses_by_its_least_divergence_and_never_rules_that_see_data() -> None:
    one = rows(0.02)[0]
    assert least_of_all(one)["rule"] == "new"
    assert least_noise("average")(one)["length"] == "one"


@pytest.mark.parametrize(("good", "said_of_new"), [(0.02, "`new`"), (0.005, "none"), (-0.01, "none")])
def test_bars_are_held_on_the_subjects_that_confirm(good: float, said_of_new: str, tmp_path: Path) -> None:
    """20 points where the rule was chosen count for nothing; the bound by a fixed scale on test data neither."""
    said = verdict(rows(good)).splitlines()
    assert [line.split(":")[0] for line in said] == [
        f"* {kind}, {where}"
        for kind in ("LoRA", "full fine-tuning")
        for where in ("the 1 subjects of digits", "the 1 on pretrained bases", "all 2 subjects")
    ]
    assert all(said_of_new in line for line in said)
    assert "best on test" not in "".join(said)
    assert "Not measured" in verdict([])
    assert read_rows(tmp_path / "none") == []


def test_a_rule_that_a_subject_lacks_is_judged_where_it_was_measured_only() -> None:
    every = rows(0.02)
    every[-1]["rows"] = [m for m in every[-1]["rows"] if m["rule"] != "new"]
    said = verdict(every).splitlines()
    assert ["`new`" in line for line in said[:3]] == [True, False, False]
    lora = {line[0]: line[1:] for line in TABLES["lora"][1](every)}
    assert lora["`new`"][4:6] == ["", ""]


def test_what_comes_near_is_told_with_its_interval() -> None:
    lora, full = near_rows(rows(0.007), True), near_rows(rows(0.007), False)
    assert lora[0] == ["`new`", "+0.7 ±0.0", "+0.7"]
    assert ["`new`", "+1.7 ±0.0", "+0.7"] in full, "to `actmat`, and to the better of average and TSV"
