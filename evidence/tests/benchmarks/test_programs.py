"""The benchmark programs measure what they claim, compare with another revision, and find the data of the suites."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import against, common, floor
from benchmarks.common import relative_error
from benchmarks.data.__main__ import check, content_hash, fetch
from benchmarks.data.images import orders
from benchmarks.data.table import IMAGES, TEXTS, DataFile, files
from benchmarks.make_llama import Size, make_family
from benchmarks.provenance import EVIDENCE, REPOSITORY
from benchmarks.table import result
from benchmarks.tools import inputs
from evidence.tests.helpers.tolerances import F64_IDENTITY
from safetensors.torch import load_file, save_file

from actmat import merge_matrices
from actmat.errors import CheckpointError
from actmat_experiments.pretrained.text_tasks import TASKS as TEXT_TASKS

# The benchmark programs measure what they claim: inputs made again byte for byte, memory seen, tables true.


TINY = Size(hidden=16, intermediate=24, layers=1, heads=2, key_value_heads=1, vocabulary=20)
FOLDER = EVIDENCE / "benchmarks"
PROGRAMS = sorted(
    [p.stem for p in FOLDER.glob("*.py") if "__main__" in p.read_text()]
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
    done = subprocess.run([sys.executable, "-c", code], cwd=EVIDENCE, capture_output=True, text=True, check=False)
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
    run = common.measure([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"])
    assert 200e6 < run.peak_anonymous_b < 300e6
    assert 0.3 < run.wall_s < 20


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
    assert common.largest_difference(tmp_path / "x", tmp_path / "x") == 0
    assert common.largest_difference(tmp_path / "y", tmp_path / "x") == pytest.approx(0.25)
    with pytest.raises(RuntimeError, match="different tensors"):
        common.largest_difference(tmp_path / "x", tmp_path / "z")


def test_references_of_the_tools_on_entries_that_are_known() -> None:
    """TIES keeps the largest fifth of each and averages what agrees; slerp keeps the norm between equal norms."""
    one, other = torch.zeros(2, 10).double()
    one[:2], other[:2] = torch.tensor([4.0, 3.0]), torch.tensor([2.0, -5.0])
    assert inputs.REFERENCES["ties"](one, [one, other]).tolist() == [3.0, -5.0, *[0.0] * 8]
    draws = torch.randint(-12, 13, (3, 12, 5), generator=torch.Generator().manual_seed(0))
    equal = list(draws.double() / 8)  # at the cut, too
    ours = merge_matrices("ties", equal, density=0.2, variant="mergekit")
    assert relative_error(inputs.REFERENCES["ties"](one, equal), ours) < F64_IDENTITY
    base = torch.zeros(2).double()
    middle = inputs.REFERENCES["slerp"](base, [torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()])
    assert relative_error(middle, torch.full((2,), 0.5**0.5, dtype=torch.float64)) < F64_IDENTITY


def test_the_floor_counts_what_no_way_avoids(monkeypatch: pytest.MonkeyPatch) -> None:
    """With operations in place of seconds: a dual form for few rows, and less where fewer directions are kept."""
    flops = {
        "product": lambda o, i, n, *_: 2 * o * i * n,
        "gram": lambda o, i: o * i * i,
        "cholesky": lambda n, _: n**3,
    }
    flops |= {
        "addition": lambda i: 0,
        "touch": lambda n: 0,
        "solve": lambda n, o, _: 2 * o * n * n,
        "eigh": lambda n: 9 * n**3,
    }
    for name, count in flops.items():
        monkeypatch.setattr(floor, name, count)
    assert floor.floor_seconds((10, 10), 2, "actmat_ridge", 10) == 2 * (1000 + 2000) + 1000 + 2000
    assert set(floor.moments(4, 10, 2)) == {"primal", "dual"}
    assert floor.spectral(10, 10, 10) == 3000
    assert floor.spectral(10, 1, 10) < floor.spectral(10, 5, 10)


def test_a_recorded_command_holds_no_path_of_this_machine() -> None:
    given = ["--methods", "ties", "--mergekit-python", "/a/bin/python", "--work", "/some/where", "--repeats", "2"]
    assert common.without_places(given) == ["--methods", "ties", "--work", "WORK", "--repeats", "2"]


def test_the_ratio_of_pairs_ignores_the_drift_of_the_machine() -> None:
    old = [1.0, 2.0, 4.0]
    ratio, low, high = against.paired_ratio(old, [x * 1.1 for x in old])
    assert (ratio, low, high) == pytest.approx((1.1, 1.1, 1.1))
    ratio, low, high = against.paired_ratio([1.0, 1.0, 1.0], [math.exp(x) for x in (-0.1, 0.0, 0.1)])
    half = 4.302653 * 0.1 / math.sqrt(3)  # Student's t with two degrees of freedom
    assert (ratio, low, high) == pytest.approx((1.0, math.exp(-half), math.exp(half)), rel=1e-5)
    assert against.paired_ratio([2.0], [3.0]) == (pytest.approx(1.5), None, None)


@pytest.mark.parametrize(
    ("old", "new", "judged"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1.01, 0.99], "not dearer"),
        ([1.0, 1.0, 1.0], [1.2, 1.21, 1.19], "dearer"),
        ([1.0, 1.0, 1.0], [0.8, 1.0, 1.3], "unclear"),
        ([1.0], [1.0], "unclear"),
    ],
)
def test_a_judgment_waits_for_the_interval(old: list[float], new: list[float], judged: str) -> None:
    row = against.ratio_row(old, new)
    assert row["judged"] == judged
    assert (row["old"], row["all_new"]) == (1.0, new)


# The data of the suites: sources, hashes, and their making from a stand-in of the public originals.


REPO, COMMIT = "someone/originals", "0" * 40


@pytest.fixture
def site(tmp_path: Path) -> tuple[Path, str]:
    """Folder of a repository's files, and the address at which it can be read."""
    folder = tmp_path / "site" / REPO
    (folder / COMMIT).mkdir(parents=True)
    return folder, (tmp_path / "site").as_uri()


def row(name: str, sha256: str) -> DataFile:
    return DataFile(name, REPO, COMMIT, 0, sha256, "MIT")


def test_every_file_has_a_source_a_hash_and_a_recipe() -> None:
    found = files()
    assert set(found) == {*TEXTS, *IMAGES}
    assert len(found) == 36
    for file in found.values():
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256), file
        assert re.fullmatch(r"[0-9a-f]{40}", file.commit), file
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", file.repo), file
        assert file.bytes > 10_000, file
        assert file.license, file


def test_the_suites_find_their_files_in_the_table() -> None:
    assert {f"text/{name}" for source in TEXT_TASKS.values() for name in source.files} <= set(TEXTS)
    pages = "".join(
        (REPOSITORY / "docs" / "experiments" / f"{p}.md").read_text() for p in ("vision-small", "text-minilm")
    )
    assert "python -m benchmarks.data" in pages


def test_a_text_is_made_checked_and_kept(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mirror = site
    (folder / COMMIT / "data").mkdir()
    (folder / COMMIT / "data" / "TREC.test.all").write_bytes("1 What is caf\xe9 ?\n0 Who ran ?\n\n".encode("latin-1"))
    want = '{"text": "What is café ?", "label": 1}\n{"text": "Who ran ?", "label": 0}\n'.encode()
    file = row("text/trec.test.jsonl", content_hash("a", want))
    assert fetch(file, tmp_path / "out", mirror) == "made"
    path = tmp_path / "out" / file.name
    assert path.read_bytes() == want
    assert fetch(file, tmp_path / "out", "http://127.0.0.1:9") == "there", "no network for what is there"
    path.write_text("other")
    with pytest.raises(CheckpointError, match="remove it, and fetch it again"):
        fetch(file, tmp_path / "out", mirror)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        check(file, tmp_path / "out")


def test_another_content_is_refused_and_not_written(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, mirror = site
    (folder / COMMIT / "data").mkdir()
    (folder / COMMIT / "data" / "HumanEval.jsonl.gz").write_bytes(b"changed since")
    file = row("reasoning/HumanEval.jsonl.gz", "a" * 64)
    with pytest.raises(CheckpointError, match=f"expected {'a' * 64}.*nothing was written"):
        fetch(file, tmp_path / "out", mirror)
    assert not (tmp_path / "out").exists()


def test_orders_name_each_image_once() -> None:
    assert set(orders()) >= {"dtd10.train", "dtd10.test", "usps.test"}
    for name, order in orders().items():
        assert len(set(order)) == len(order), name
    assert sorted([*orders()["dtd10.train"], *orders()["dtd10.test"]]) == list(range(1200))
