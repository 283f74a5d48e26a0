"""Several outputs of one merge are one table."""

import json
import shlex
from pathlib import Path

import pytest
from tests.helpers.merging import Family, actmat

from actmat.cli import summary

METHODS = [
    "average",
    "task_arithmetic",
    "linear",
    "ties",
    "dare",
    "breadcrumbs",
    "della",
    "sce",
    "actmat",
    "tsv",
    "iso_c",
]


def _merged(models: Path, out: Path, methods: list[str], *more: str) -> str:
    inputs = ["-b", "base", "-e", "experts/math", "-e", "experts/code"]
    flags = [f for m in methods for f in ("-m", m)]
    argv = ["merge", *(w if w.startswith("-") else str(models / w) for w in inputs), *flags, "--out", str(out), *more]
    done = actmat(argv)
    assert done.code == 0, done.err
    return done.out


def test_eleven_methods_take_a_row_each_and_say_what_they_share_once(models: Path, tmp_path: Path) -> None:
    said = _merged(models, tmp_path / "grid", METHODS)
    lines = said.splitlines()
    assert len(lines) <= 25
    for method in METHODS:
        assert sum(line.startswith(f"{method} ") for line in lines) == 1
    assert said.count("tensors of each") == said.count("written in") == 1
    assert "warning AM402" in next(line for line in lines if line.startswith("actmat "))
    assert "warning AM402: actmat: " in said
    assert "actmat diagnose " in said
    again = _merged(models, tmp_path / "grid", METHODS)
    assert again.count("complete before") == len(METHODS)


def test_a_note_of_one_method_is_said_with_its_name(models: Path, tmp_path: Path) -> None:
    said = " ".join(_merged(models, tmp_path / "grid", ["average", "linear", "dc_merge"]).split())
    assert "note (dc_merge): dc_merge: a single expert is not returned unchanged" in said


def test_findings_of_a_diagnosis_are_in_the_table(models: Path, tmp_path: Path) -> None:
    said = _merged(models, tmp_path / "grid", ["average", "linear", "actmat"], "--diagnose")
    assert "AM402" in next(line for line in said.splitlines() if line.startswith("actmat "))
    assert said.count("report.html") == 3


def test_two_outputs_keep_a_summary_each(models: Path, tmp_path: Path) -> None:
    assert _merged(models, tmp_path / "pair", ["average", "ties"]).count("is it good? Not measured: ") == 2


def test_an_error_of_rounding_is_no_number(models: Path, tmp_path: Path) -> None:
    adapters = [str(models / "adapters" / name) for name in ("math", "code")]
    flags = [f for a in adapters for f in ("-e", a)]
    done = actmat(["merge", *flags, "-m", "average", "--rank", "8", "--out", str(tmp_path / "out")])
    assert done.code == 0, done.err
    assert "exact: nothing was truncated" in done.out
    assert "e-1" not in done.out


def test_the_command_that_a_summary_prints_shows_the_other_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "MOST_NOTES", 0)
    family = Family.make(tmp_path / "with space")
    shown = actmat([flag for flag in family.argv() if flag != "--quiet"])
    (line,) = (line for line in shown.out.splitlines() if "more notes" in line)
    notes = actmat(shlex.split(line.partition(": ")[2])[1:])
    recorded = json.loads((family.out / "actmat_manifest.json").read_text())["notes"]
    assert " ".join(notes.out.split()) == " ".join(f"{n['severity']}: {n['text']}" for n in recorded) != ""
