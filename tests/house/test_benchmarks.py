"""The benchmark programs measure what they claim: inputs made again byte for byte, memory seen, tables true."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import common, matrix
from benchmarks.elementwise import RULES, largest_difference, mergekit_recipe
from benchmarks.make_llama import Size, make_family, shards, write_checkpoint
from benchmarks.table import filled
from safetensors.torch import load_file, save_file
from tests.helpers.repository import ROOT
from tests.tolerances import F64_IDENTITY, relative_error

TINY = Size(hidden=16, intermediate=24, layers=1, heads=2, key_value_heads=1, vocabulary=20)
PROGRAMS = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem != "__init__")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_is_documented(program: str) -> None:
    assert f"`{program}`" in (ROOT / "benchmarks" / "README.md").read_text()
    source = (ROOT / "benchmarks" / f"{program}.py").read_text()
    assert f"python -m benchmarks.{program}" in source.split('"""')[1]


@pytest.mark.slow
def test_programs_explain_themselves() -> None:
    code = (
        "import sys, importlib, contextlib\n"
        f"for name in {PROGRAMS!r}:\n"
        "    sys.argv = [name, '--help']\n"
        "    try: importlib.import_module('benchmarks.' + name).main()\n"
        "    except SystemExit as end: assert not end.code\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(PROGRAMS)


# make_llama


def test_size_of_the_default_model() -> None:
    assert 1.09e9 < Size().parameters() < 1.11e9


def test_checkpoints_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", TINY, expert=1)
    write_checkpoint(tmp_path / "b", TINY, expert=1)
    a, b = ((tmp_path / n / "model.safetensors").read_bytes() for n in "ab")
    assert a == b


def test_an_expert_differs_a_little_in_every_tensor(tmp_path: Path) -> None:
    base, experts = make_family(tmp_path, TINY, 2, change=1e-2)
    weights = load_file(base / "model.safetensors")
    for expert in experts:
        for name, tensor in load_file(expert / "model.safetensors").items():
            assert 0.5e-2 < relative_error(tensor, weights[name]) < 2e-2, name
    assert not [p for p in base.iterdir() if p.suffix == ".settings"]


def test_a_family_is_kept_while_its_settings_last(tmp_path: Path) -> None:
    base, _ = make_family(tmp_path, TINY, 0, seed=1)
    first = (base / "model.safetensors").stat().st_mtime_ns
    make_family(tmp_path, TINY, 0, seed=1)
    assert (base / "model.safetensors").stat().st_mtime_ns == first
    make_family(tmp_path, TINY, 0, seed=2)
    assert (base / "model.safetensors").stat().st_mtime_ns != first


def test_shards_keep_order_and_limit() -> None:
    parts = list(shards({"a": (4,), "b": (4,), "c": (100,), "d": (1,)}, itemsize=2, limit=16))
    assert [list(p) for p in parts] == [["a", "b"], ["c"], ["d"]]


def test_sharded_equals_whole(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", TINY)
    write_checkpoint(tmp_path / "cut", TINY, shard_bytes=1000)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())["weight_map"]
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "cut" / index[name])[name])


# common


def test_a_child_is_measured(tmp_path: Path) -> None:
    code = "import time; a = bytearray(b'1') * 200_000_000; time.sleep(0.3); open('out', 'w').write('x')"
    run = common.measure([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"], tmp_path / "out")
    assert 200e6 < run.peak_anonymous_b < 300e6
    assert 0.3 < run.wall_s <= run.durable_s < 20


def test_memory_of_a_grandchild_counts() -> None:
    child = "import time; a = bytearray(b'1') * 200_000_000; time.sleep(0.3)"
    run = common.measure(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    )
    assert run.peak_anonymous_b > 200e6


def test_a_failed_child_is_an_error_with_its_words() -> None:
    with pytest.raises(RuntimeError, match=r"exit status 3[\s\S]*oh no"):
        common.measure([sys.executable, "-c", "print('oh no'); raise SystemExit(3)"])


def test_floor_reads_and_writes(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"1" * 1000)
    assert common.floor_seconds([tmp_path / "in"], 40_000_000, tmp_path) > 0
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# tables


def test_tables_are_filled_from_results_and_nothing_else_changes(tmp_path: Path) -> None:
    result = {
        "command": "c",
        "processor": "p",
        "cores": 2,
        "torch": "t",
        "date": "d",
        "columns": ["a", "peak_b", "x_s"],
    }
    rows = [{"a": "name", "peak_b": 1 << 30, "x_s": 1.23456, "hidden": 1}, {"a": "other"}]
    (tmp_path / "one.json").write_text(json.dumps({**result, "rows": rows}))
    places = "<!-- table: one -->\nold\n<!-- end table -->\nbetween\n<!-- table: two -->\n<!-- end table -->\n"
    page = f"before\n{places}after\n"
    out = filled(page, tmp_path)
    assert "| a | peak, GiB | x, s |" in out
    assert "| name | 1 | 1.23 |" in out
    assert "| other | - | - |" in out
    assert "old" not in out
    assert "no `results/two.json`" in out
    assert [out.startswith("before\n"), "\nbetween\n" in out, out.endswith("\nafter\n")] == [True] * 3
    assert filled(out, tmp_path) == out


@pytest.mark.parametrize("name", ["benchmarks/README.md", "docs/performance.md", "docs/formats/quantised.md"])
def test_the_tables_of_a_page_are_what_the_results_say(name: str) -> None:
    page = (ROOT / name).read_text()
    assert filled(page) == page, f"run: python -m benchmarks.table {name}"


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


@pytest.mark.parametrize("name", sorted(RULES))
def test_both_tools_are_asked_for_the_same(name: str) -> None:
    from actmat.methods import all_methods

    rule = RULES[name]
    if known := {m.name: m for m in all_methods()}.get(name):
        assert rule.options.keys() <= known.options.keys()
    recipe = mergekit_recipe(rule, Path("base"), [Path("one"), Path("two")], "float32", "bfloat16")
    assert ("base_model" in recipe) == rule.with_base
    assert [m["model"] for m in recipe["models"]] == ["one", "two"]


@pytest.mark.parametrize("spectrum", ["gaussian", "power"])
def test_naive_formulae_on_orthogonal_rows_and_one_expert(spectrum: str) -> None:
    a, b = (d.double() for d in matrix.make_deltas(2, 12, 10, spectrum))
    for name in ("actmat", "tsv"):
        assert relative_error(matrix.NAIVE[name]([a]), a) < F64_IDENTITY, name
    basis = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    left, right = a @ basis[:, :5] @ basis[:, :5].mT, b @ basis[:, 5:] @ basis[:, 5:].mT
    assert relative_error(matrix.naive_actmat([left, right]), left + right) < F64_IDENTITY


def test_spectra_are_what_they_are_called() -> None:
    flat, steep = (matrix.make_deltas(1, 40, 30, s)[0] for s in ("gaussian", "power"))
    values = torch.linalg.svdvals(steep)
    assert (values[0] / values[9]).item() == pytest.approx(10, rel=1e-3)
    assert torch.linalg.cond(flat) < 50
    assert flat.norm().item() == pytest.approx(steep.norm().item(), rel=0.1)


def test_a_recorded_command_holds_no_path_of_this_machine() -> None:
    given = ["--methods", "ties", "--mergekit-python", "/a/bin/python", "--work", "/some/where", "--repeats", "2"]
    assert common.without_places(given) == ["--methods", "ties", "--work", "WORK", "--repeats", "2"]
    found = [json.loads(f.read_text()) for f in (ROOT / "benchmarks" / "results").glob("*.json")]
    recorded = [result["command"] for result in found if "command" in result]
    assert recorded
    assert not [command for command in recorded if " /" in command]


def test_rates_of_memory_are_those_of_filling_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds stand in for clocks: a fresh gibibyte takes four of them, one that is kept takes half of one."""
    monkeypatch.setattr(common, "once", lambda work: work() is None or 4.0)
    monkeypatch.setattr(common, "timed", lambda work: work() is None or 0.5)
    rates = common.memory_rates(1 << 20)
    assert rates == {"memory_first_touch_gbps": 2**18 / 1e9, "memory_fill_gbps": 2**21 / 1e9}
