"""What the commands print and return: help, plan, methods, inspect, verify, exit codes of the command line itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.merging import EMBEDDING, NORM, Q0, Family, actmat, hidden

import actmat as actmat_package
from actmat.methods import all_methods

COMMANDS = ("merge", "plan", "diagnose", "methods", "inspect", "verify", "demo")


def test_the_help_lists_every_command_and_the_exit_codes() -> None:
    text = actmat(["--help"]).out
    for words in (*COMMANDS, "Exit codes", "130"):
        assert words in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["mrege"],
        ["merge", "--no-such-flag"],
        ["merge", "--scale", "much"],
        ["merge", "--out", "x"],
        ["merge", "--base", "b"],
        ["merge", "--base", "b", "--expert", "e"],
        ["plan"],
        ["inspect"],
        ["verify"],
    ],
)
def test_a_wrong_command_line_exits_with_two(argv: list[str]) -> None:
    actmat(argv, code=2)


def test_the_console_script_passes_exit_codes_on(tmp_path: Path) -> None:
    script = "import sys; sys.argv = ['actmat', 'inspect', './nothing']; from actmat.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(actmat_package.__file__).parents[1])},
        check=False,
    )
    assert done.returncode == 1
    assert "actmat: ./nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_tells_every_tensor_and_writes_nothing(family: Family) -> None:
    before = sorted(family.root.rglob("*"))
    outcome = actmat(family.argv("--method", "actmat", "--json", "--full", command="plan"), code=0)
    data = json.loads(outcome.out)
    assert data["actmat_plan"] == 1
    assert data["family"] == "llama"
    assert [e["label"] for e in data["experts"]] == ["expert0", "expert1"]
    rows = {i["target"]["spec"]["name"]: i for i in data["items"]}
    assert len(rows) == 7
    q = rows[Q0]
    assert (q["action"], q["call"]["method"], q["target"]["layout"]["role"]) == ("merge", "actmat", "linear")
    assert [s["name"] for s in q["target"]["sources"]] == [Q0, Q0]
    assert [s["name"] for s in q["write"]["outputs"]] == [Q0]
    assert q["cost"]["read_bytes"] == 3 * 64 * 4
    assert q["cost"]["write_bytes"] == 64 * 4
    assert q["cost"]["host_bytes"] > 0
    assert (rows[EMBEDDING]["action"], rows[NORM]["action"]) == ("average", "average")
    assert all(row["reason"] for row in rows.values())
    assert sorted(family.root.rglob("*")) == before


def test_the_plan_is_what_happens(family: Family) -> None:
    flags = ("--keep", NORM, "--scale", "0.5", "--method", "ties", "--option", "density=0.3")
    fields: dict[str, Any] = {"keep": NORM, "scale": 0.5, "method": "ties", "options": {"density": 0.3}}
    plan = actmat_package.plan(family.base, family.experts, **fields)
    assert plan.read_bytes == sum(i.cost.read_bytes for i in plan.items)
    assert plan.peak_bytes(2) > plan.peak_bytes(1)
    actmat(family.argv(*flags), code=0)
    manifest = json.loads((family.out / "actmat_manifest.json").read_text())
    for item, row in zip(plan.items, manifest["tensors"], strict=True):
        expected = {"name": item.name, "action": item.action, "reason": item.reason, "shape": list(item.shape)}
        expected |= {"role": str(item.layout.role), "dtype": item.base_dtype, "out_dtype": item.out_dtype}
        if item.call is not None:
            expected |= item.call.to_json() | {"sources": [s and s.name for s in item.sources]}
        assert {k: row[k] for k in expected} == expected
    assert any("method" in row for row in manifest["tensors"])
    shards = {s.file: s.size for s in plan.shards}
    assert shards == manifest["output"]["files"]
    for name, size in shards.items():
        assert (family.out / name).stat().st_size == size


@pytest.mark.parametrize("flags", [(), ("--all",)])
def test_the_printed_plan_fits_80_columns(family: Family, flags: tuple[str, ...]) -> None:
    outcome = actmat(family.argv(*flags, command="plan"), code=0)
    assert "actmat acts on matrices" not in outcome.out
    assert "7 tensors: 4 merge, 3 average" in outcome.out
    assert max(len(line) for line in outcome.out.splitlines()) <= 80


def test_methods_lists_all() -> None:
    text = actmat(["methods"], code=0)
    assert max(len(line) for line in text.out.splitlines()) <= 80
    data = json.loads(actmat(["methods", "--json"]).out)["methods"]
    assert [m["name"] for m in data] == [m.name for m in all_methods()]


@pytest.mark.parametrize("method", all_methods(), ids=lambda m: m.name)
def test_a_method_in_full(method: object) -> None:
    name = method.name
    (data,) = json.loads(actmat(["methods", name, "--json"]).out)["methods"]
    assert data["name"] == name
    shown = actmat(["methods", name], code=0)
    assert data["source"].split()[0] in shown.out
    assert all(o["name"] in shown.out for o in data["options"])
    assert max(len(line) for line in shown.out.splitlines()) <= 80


def test_inspect_describes_a_checkpoint(family: Family) -> None:
    data = json.loads(actmat(["inspect", family.base, "--json", "--full"]).out)
    assert data["family"] == "llama"
    assert data["parameters"] == 20 * 8 * 2 + 8 * 2 + 64 + 96 * 2
    assert data["bytes"] == 4 * data["parameters"]
    assert data["dtypes"] == {"float32": 7}
    assert data["roles"] == {"embedding": 1, "vector": 2, "linear": 4}
    assert data["files"] == {"model.safetensors": 7}
    assert data["ties"] == {}
    rows = {t["name"]: t for t in data["tensors"]}
    assert rows[Q0]["shape"] == [8, 8]
    assert all(r["reason"] for r in rows.values())


def test_a_merge_prints_a_summary(family: Family) -> None:
    outcome = actmat([a for a in family.argv() if a != "--quiet"], code=0)
    assert "4 merged, 3 averaged" in outcome.out
    assert "actmat_manifest.json" in outcome.out
    assert hidden(family.root) == []


def test_names_and_weights_of_experts(family: Family) -> None:
    first, second = family.experts
    argv = ["merge", "-b", str(family.base), "-e", f"math={first}", "-e", str(second), "-w", "2", "-w", "1", "-q"]
    actmat([*argv, "-m", "task_arithmetic", "--out", family.out], code=0)
    manifest = json.loads((family.out / "actmat_manifest.json").read_text())
    assert [e["name"] for e in manifest["experts"]] == ["math", "expert1"]
    assert manifest["tensors"][0]["weights"] == [2.0, 1.0]
    unweighted = next(m.name for m in all_methods() if not m.is_weighted and not m.needs_statistics)
    outcome = actmat([*argv, "--out", family.root / "y", "-m", unweighted])
    assert (outcome.code, "takes no weights" in outcome.err) == (1, True)
