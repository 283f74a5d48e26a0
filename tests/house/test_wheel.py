"""The program that measures the wheel, and its record."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import benchmarks.wheel as program
import pytest
from tests.helpers.repository import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
RECORD = json.loads(program.RESULTS.read_text())
LARGEST_WHEEL = 2_000_000
"""Bytes: a wheel above holds tests, figures or data that it should not."""


def test_every_extra_for_users_was_resolved() -> None:
    assert set(RECORD["extras"]) == {"", *EXTRAS} - set(program.TOOLS)
    own = RECORD["extras"][""]
    assert own["largest"][0] == "torch"
    assert all(r["packages"] >= 0 and r["bytes"] >= 0 for r in RECORD["extras"].values())
    most = max(r["packages"] for n, r in RECORD["extras"].items() if n not in ("", "all"))
    assert RECORD["extras"]["all"]["packages"] >= most


def test_times_are_of_several_pythons_and_in_order() -> None:
    assert len({r["python"].rpartition(".")[0] for r in RECORD["times"]}) >= 3
    for r in RECORD["times"]:
        assert r["start_ms"] < r["import_ms"] < r["help_ms"]


def test_the_wheel_is_built_and_is_small(tmp_path: Path) -> None:
    wheel = program.build(tmp_path)
    found = program.contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert found["bytes"] == wheel.stat().st_size < LARGEST_WHEEL
    assert found["files"] == len(names)
    assert not [n for n in names if re.search(r"(^|/)tests?/|\.png$|\.safetensors$", n)]
    assert "cli" in found["largest"] or len(found["largest"]) == 5


def test_sizes_are_those_of_installed_files(tmp_path: Path) -> None:
    version = metadata.version("typer")
    found = program.sizes({"typer": version}, tmp_path)
    place = metadata.distribution("typer").locate_file("typer/main.py")
    assert found["typer"] > Path(str(place)).stat().st_size > 0


def test_the_least_time_counts_and_a_failure_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RUNS", 2)
    nothing = program.least_ms([sys.executable, "-c", ""], {})
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    assert program.least_ms([sys.executable, "-c", busy], {}) >= 500 > 0
    assert 0 < nothing < 500
    with pytest.raises(program.subprocess.CalledProcessError):
        program.least_ms([sys.executable, "-c", "raise SystemExit(1)"], {})
