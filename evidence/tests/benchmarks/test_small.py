"""The tables of the suites at laptop size, from rows that are known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.evidence.small import small_table

from actmat_experiments.harness.results import Score

ROWS = {"base": (40, 50), "experts": (80, 100), "average": (48, 60), "cart": (60, 64)}


def lines(suite: str, regime: str = "full", model: str = "", *, settings: str = "s", at: str = "") -> list[Score]:
    detail = {"versions": {"torch": "2"}, "scale": 1.0, "low": 0.4, "high": 0.6}
    return [
        Score(suite, regime, row, "default", f"{task}{at}", 0, right, 100, model, settings, detail)
        for row, values in ROWS.items()
        for task, right in zip(("a", "b"), values, strict=True)
    ]


def write(folder: Path, suite: str, scores: list[Score]) -> None:
    (folder / f"{suite}.jsonl").write_text("".join(json.dumps(asdict(s)) + "\n" for s in scores))


def cells(text: str, row: str) -> list[str]:
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_table_has_the_rows_of_the_last_settings_and_its_source(tmp_path):
    write(tmp_path, "vision-small", lines("vision-small", settings="older") + lines("vision-small")[:-2])
    text = small_table("vision-small_full", tmp_path)
    assert cells(text, "`average`") == ["default", "54.0 ±6.9", "60.0", "48.0", "60.0"]
    assert "`cart`" not in text, "a row of other settings"
    assert "Seed 0; torch 2. Source: `evidence/results/small/vision-small.jsonl`." in text
    assert small_table("vision-small_lora", tmp_path) == "*Not run yet.*\n"


def test_answers_that_were_drawn_several_times_have_a_column_each(tmp_path):
    expert = [Score("reasoning-small", "full", "expert a", "default", f"a@{k}", 0, 7, 10, "float32", "s",
                    {"low": 0.5, "high": 0.9}) for k in (1, 8)]  # fmt: skip
    some = [s for at in ("@1", "@8") for s in lines("reasoning-small", model="float32", at=at)]
    write(tmp_path, "reasoning-small", [*some, *expert])
    text = small_table("reasoning-small_at-k", tmp_path)
    assert text.splitlines()[0] == "|  | a@1 | b@1 | a@8 | b@8 |"
    assert [x.split("|")[1].strip() for x in text.splitlines()[2:7]] == [
        *("`base`", "`expert a`", "`experts`", "`cart`", "`average`")
    ]
    assert cells(text, "`expert a`") == ["70.0 ±20.0", "", "70.0 ±20.0", ""]
    shown = small_table("reasoning-small_full", tmp_path)
    assert "expert a" not in shown
    assert cells(shown, "`cart`")[1].startswith("62.0")
