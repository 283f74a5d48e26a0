"""The benchmark programs measure what they claim: inputs made again byte for byte, memory seen, tables true."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import common, matrix
from benchmarks.elementwise import largest_difference
from benchmarks.make_llama import Size, make_family
from benchmarks.table import result
from safetensors.torch import load_file, save_file
from tests.helpers.repository import ROOT
from tests.tolerances import F64_IDENTITY, relative_error

TINY = Size(hidden=16, intermediate=24, layers=1, heads=2, key_value_heads=1, vocabulary=20)
FOLDER = ROOT / "benchmarks"
PROGRAMS = sorted(
    [p.stem for p in FOLDER.glob("*.py") if p.stem != "__init__"]
    + [p.parent.name for p in FOLDER.glob("*/__main__.py")]
)


def test_every_program_is_documented() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [p for p in PROGRAMS if f"| `{p}` |" not in page] == []


@pytest.mark.slow
def test_programs_explain_themselves() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {PROGRAMS!r}:\n"
        "    sys.argv = [name, '--help']\n"
        "    module = importlib.import_module('benchmarks.' + name)\n"
        "    if not hasattr(module, 'main'): module = importlib.import_module(f'benchmarks.{name}.__main__')\n"
        "    try: module.main()\n"
        "    except SystemExit as end: assert not end.code\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(PROGRAMS)


# make_llama


def test_an_expert_differs_a_little_in_every_tensor(tmp_path: Path) -> None:
    base, experts = make_family(tmp_path, TINY, 2, change=1e-2)
    weights = load_file(base / "model.safetensors")
    for expert in experts:
        for name, tensor in load_file(expert / "model.safetensors").items():
            assert 0.5e-2 < relative_error(tensor, weights[name]) < 2e-2, name
    assert not [p for p in base.iterdir() if p.suffix == ".settings"]


# common


def test_a_child_is_measured(tmp_path: Path) -> None:
    code = "import time; a = bytearray(b'1') * 200_000_000; time.sleep(0.3); open('out', 'w').write('x')"
    run = common.measure([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"], tmp_path / "out")
    assert 200e6 < run.peak_anonymous_b < 300e6
    assert 0.3 < run.wall_s <= run.durable_s < 20


# tables


def test_a_table_is_made_of_a_result_file(tmp_path: Path) -> None:
    rows = [{"a": "name", "peak_b": 1 << 30, "x_s": 1.23456, "hidden": 1}, {"a": "other"}]
    made = {"command": "c", "cores": 2, "date": "d", "columns": ["a", "peak_b", "x_s"], "rows": rows}
    (tmp_path / "one.json").write_text(json.dumps(made))
    assert result("one", tmp_path) == (
        "`c`, 2 cores, d.\n\n| a | peak, GiB | x, s |\n|---|---|---|\n| name | 1 | 1.23 |\n| other | - | - |\n"
    )


# what is compared


def test_largest_difference_finds_the_worst_tensor(tmp_path: Path) -> None:
    one = {"a": torch.ones(4), "b": torch.full((2,), 2.0)}
    for name, tensors in (("x", one), ("y", {**one, "b": torch.full((2,), 2.5)}), ("z", {"a": one["a"]})):
        (tmp_path / name).mkdir()
        save_file(tensors, str(tmp_path / name / "model.safetensors"))
    assert largest_difference(tmp_path / "x", tmp_path / "x") == 0
    assert largest_difference(tmp_path / "y", tmp_path / "x") == pytest.approx(0.25)
    with pytest.raises(RuntimeError, match="different tensors"):
        largest_difference(tmp_path / "x", tmp_path / "z")


@pytest.mark.parametrize("spectrum", ["gaussian", "power"])
def test_naive_formulae_on_orthogonal_rows_and_one_expert(spectrum: str) -> None:
    a, b = (d.double() for d in matrix.make_deltas(2, 12, 10, spectrum))
    for name in ("actmat", "tsv"):
        assert relative_error(matrix.NAIVE[name]([a]), a) < F64_IDENTITY, name
    basis = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    left, right = a @ basis[:, :5] @ basis[:, :5].mT, b @ basis[:, 5:] @ basis[:, 5:].mT
    assert relative_error(matrix.naive_actmat([left, right]), left + right) < F64_IDENTITY


def test_a_recorded_command_holds_no_path_of_this_machine() -> None:
    given = ["--methods", "ties", "--mergekit-python", "/a/bin/python", "--work", "/some/where", "--repeats", "2"]
    assert common.without_places(given) == ["--methods", "ties", "--work", "WORK", "--repeats", "2"]
