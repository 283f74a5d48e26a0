"""`import actmat` and `actmat --help` are fast: nothing heavy is imported before a command needs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers.merging import save_checkpoint
from tests.helpers.repository import SOURCES

from actmat.cli.listing import COMMANDS

HEAVY = ("torch", "transformers", "peft", "matplotlib", "sklearn", "scipy", "datasets", "ray", "pydantic", "yaml")


def imported_by(code: str, wanted: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the wanted modules are loaded in a fresh interpreter that has run `code`; by default the heavy ones."""
    tail = f"\nimport json, sys\nprint('\\n' + json.dumps([m for m in {wanted!r} if m in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_import_actmat_is_light() -> None:
    assert imported_by("import actmat") == []


def called(*arguments: str) -> str:
    """Code that runs a command."""
    return f"""
import sys
sys.argv = {["actmat", *arguments]!r}
from actmat.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("arguments", [["--help"], ["methods"], ["methods", "ties", "--json"], ["merge", "--help"]])
def test_commands_that_compute_nothing_are_light(arguments: list[str]) -> None:
    schema = {"pydantic", "yaml"} if arguments != ["--help"] else set()  # of the recipe, for flags
    assert set(imported_by(called(*arguments))) <= schema


def test_a_command_imports_no_other_command() -> None:
    modules = (*(f"actmat.cli.{module}" for module in COMMANDS), "rich.progress")
    assert imported_by(called("methods"), modules) == ["actmat.cli.methods"]
    assert imported_by(called("--version"), modules) == []


def test_a_merge_imports_what_it_uses(tmp_path: Path) -> None:
    """No client of the hub or the web for local files, no reader of other tools' recipes, no classes of configs."""
    for name, config in {"base": {"rope_theta": 1e4}, "expert": {}}.items():
        save_checkpoint(tmp_path / name, {"w": torch.ones(2, 2)}, {"model_type": "llama", **config})
    arguments = ("-b", tmp_path / "base", "-e", tmp_path / "expert", "--out", tmp_path / "out", "--quiet")
    foreign = (
        "huggingface_hub",
        "httpx",
        "fsspec",
        "ray",
        "transformers",
        "actmat.extras.mergekit",
        "actmat.report.schema",
    )
    code = called("merge", *map(str, arguments), "-m", "average", "--set", "scope=all", "--threads", "1")
    assert imported_by(code, foreign) == []
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_heavy_import_is_seen() -> None:
    assert imported_by("import yaml") == ["yaml"]
