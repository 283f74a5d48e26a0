"""`import actmat` and `actmat --help` are fast: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.helpers.repository import SOURCES

HEAVY = (
    "torch",
    "transformers",
    "peft",
    "matplotlib",
    "sklearn",
    "scipy",
    "pandas",
    "datasets",
    "ray",
    "pydantic",
    "yaml",
)


def imported_by(code: str) -> list[str]:
    """Which heavy packages are loaded in a fresh interpreter that has run `code`."""
    tail = f"\nimport json, sys\nprint('\\n' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_import_actmat_is_light() -> None:
    assert imported_by("import actmat") == []


@pytest.mark.parametrize("arguments", [["--help"], ["methods"], ["methods", "ties", "--json"], ["merge", "--help"]])
def test_commands_that_compute_nothing_are_light(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = {["actmat", *arguments]!r}
from actmat.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    schema = {"pydantic", "yaml"} if arguments != ["--help"] else set()  # of the recipe, for flags
    assert set(imported_by(code)) <= schema


def test_a_heavy_import_is_seen() -> None:
    assert imported_by("import torch") == ["torch"]
