"""Summaries of outputs."""

import json
import shlex
from pathlib import Path

import pytest
from tests.helpers.merging import Family, actmat

from actmat.cli import summary


def test_every_output_has_a_summary(models: Path, tmp_path: Path) -> None:
    inputs = ["-b", str(models / "base"), "-e", str(models / "experts/math"), "-e", str(models / "experts/code")]
    done = actmat(
        ["merge", *inputs, "-m", "average", "-m", "ties", "-m", "dc_merge", "--out", tmp_path / "out"], code=0
    )
    assert done.out.count("is it good? Not measured: ") == 3


def test_an_error_of_rounding_is_no_number(models: Path, tmp_path: Path) -> None:
    adapters = [str(models / "adapters" / name) for name in ("math", "code")]
    flags = [f for a in adapters for f in ("-e", a)]
    done = actmat(["merge", *flags, "-m", "average", "--rank", "8", "--out", tmp_path / "out"], code=0)
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
    assert notes.words == " ".join(f"{n['severity']}: {n['text']}" for n in recorded) != ""
