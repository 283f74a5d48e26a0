"""The comparison with another revision: what counts as the same, ratios of pairs, and one real merge."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks import against
from benchmarks.comparison import timings
from benchmarks.comparison.inputs import EXPERTS
from benchmarks.comparison.merges import INPUTS, MERGES
from benchmarks.comparison.outputs import compare_weights
from safetensors.torch import save_file
from tests.helpers.repository import ROOT

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([0.0, float("nan")]), "c": torch.ones(2).bfloat16()}


def output(folder: Path, file: str = "model.safetensors", **changes: torch.Tensor | None) -> Path:
    """A folder with one weight file; a change of None leaves a tensor out."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t for n, t in (WEIGHTS | changes).items() if t is not None}, folder / file)
    return folder


# weights


def test_equal_outputs_are_the_same(tmp_path: Path) -> None:
    found = compare_weights(output(tmp_path / "old"), output(tmp_path / "new"))
    assert (found.verdict(), found.files, found.same_files, found.tensors, found.entries) == ("same", 1, 1, 3, 0)


def test_one_changed_entry_is_counted_and_measured(tmp_path: Path) -> None:
    changed = WEIGHTS["a"].clone()
    changed[1, 2] = 5.5
    found = compare_weights(output(tmp_path / "old"), output(tmp_path / "new", a=changed))
    assert (found.verdict(), found.same_files, found.same_tensors, found.entries) == ("differs", 0, 2, 1)
    assert found.difference == pytest.approx(0.5 / math.sqrt(55))


def test_bits_count_not_values(tmp_path: Path) -> None:
    found = compare_weights(output(tmp_path / "old"), output(tmp_path / "new", b=torch.tensor([-0.0, float("nan")])))
    assert (found.verdict(), found.entries, found.difference) == ("differs", 1, 0.0)
    broken = compare_weights(tmp_path / "old", output(tmp_path / "new", b=torch.full((2,), math.nan)))
    assert (broken.entries, broken.difference) == (1, math.inf)
    last = torch.nextafter(torch.ones(2), torch.full((2,), 2.0))
    output(tmp_path / "old", b=torch.ones(2))
    assert compare_weights(tmp_path / "old", output(tmp_path / "new", b=last)).entries == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": None}, "only in old: a"),
        ({"d": torch.ones(1)}, "only in new: d"),
        ({"c": torch.ones(2).half()}, "c: torch.bfloat16 [2], now torch.float16 [2]"),
        ({"a": torch.arange(6.0)}, "a: torch.float32 [2, 3], now torch.float32 [6]"),
    ],
)
def test_other_tensors_are_a_difference(tmp_path: Path, change: dict[str, torch.Tensor | None], words: str) -> None:
    found = compare_weights(output(tmp_path / "old"), output(tmp_path / "new", **change))
    assert (found.verdict(), found.problems) == ("differs", (words,))


def test_another_header_or_division_into_files_leaves_the_tensors_the_same(tmp_path: Path) -> None:
    old = output(tmp_path / "old")
    (tmp_path / "new").mkdir()
    save_file(WEIGHTS, tmp_path / "new" / "model.safetensors", metadata={"made": "otherwise"})
    found = compare_weights(old, tmp_path / "new")
    assert (found.verdict(), found.same_files, found.same_tensors) == ("same tensors", 0, 3)
    output(tmp_path / "cut", "1.safetensors", c=None)
    save_file({"c": WEIGHTS["c"]}, tmp_path / "cut" / "2.safetensors")
    found = compare_weights(old, tmp_path / "cut")
    assert found.same_tensors == 3
    assert found.verdict() not in against.PASSES


# other files


# merges


def test_merges_have_names_of_their_own_and_read_inputs_that_are_made() -> None:
    names = [merge.name for merge in MERGES]
    assert len(set(names)) == len(names)
    made = {"llama", "sharded", "bfloat16", "gpt2", "mixture", "adapters", "statistics"}
    for merge in MERGES:
        paths = [Path(a.partition("=")[2] or a) for a in merge.arguments if str(INPUTS) in a]
        if merge.recipe:
            recipe = yaml.safe_load(merge.recipe)
            listed = [recipe.get("base", "llama/base"), *recipe["experts"]]
            paths += [INPUTS / (path["path"] if isinstance(path, dict) else path) for path in listed]
        assert len(paths) >= 2, merge.name
        assert {path.relative_to(INPUTS).parts[0] for path in paths} <= made, merge.name
        assert all(path.name.rpartition("-")[2] in ("base", *EXPERTS) for path in paths), merge.name


# tables


def test_the_ratio_of_pairs_ignores_the_drift_of_the_machine() -> None:
    old = [1.0, 2.0, 4.0]
    ratio, low, high = timings.paired_ratio(old, [x * 1.1 for x in old])
    assert (ratio, low, high) == pytest.approx((1.1, 1.1, 1.1))
    ratio, low, high = timings.paired_ratio([1.0, 1.0, 1.0], [math.exp(x) for x in (-0.1, 0.0, 0.1)])
    half = 4.302653 * 0.1 / math.sqrt(3)  # Student's t with two degrees of freedom
    assert (ratio, low, high) == pytest.approx((1.0, math.exp(-half), math.exp(half)), rel=1e-5)
    assert timings.paired_ratio([2.0], [3.0]) == (pytest.approx(1.5), None, None)


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
    row = timings.ratio_row(old, new)
    assert row["judged"] == judged
    assert (row["old"], row["all_new"]) == (1.0, new)


# the whole


def rows_of(folder: Path, expected: frozenset[str] = frozenset()) -> dict[str, object]:
    (merge,) = (merge for merge in MERGES if merge.name == "lora")
    return against.row(merge, folder, [(0, 0), (0, 0)], merge.name in expected)


def test_an_expected_difference_passes_and_another_fails(tmp_path: Path) -> None:
    for side, value in (("old", 1.0), ("new", 2.0)):
        output(tmp_path / side / "out" / "lora", a=torch.tensor([value]))
        (tmp_path / side / "lora.plan.json").write_text(json.dumps({"out": str(tmp_path / side), "rank": value}))
    assert rows_of(tmp_path)["verdict"] == "differs"
    found = rows_of(tmp_path, frozenset({"lora"}))
    assert (found["verdict"], found["notes"]) == ("expected", ["plan: rank (1 changed)"])


@pytest.mark.slow
def test_a_merge_with_this_very_revision_is_the_same(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.against", "HEAD", "--only", "bytes", "--merges", "lora"]
    command += ["--results", str(results), "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(results.read_text())
    (row,) = found["rows"]
    assert row["verdict"] in ("same", "differs"), row  # a working tree may be on the way to other bytes
    assert (tmp_path / "kept" / "old" / "out" / "lora" / "adapter_model.safetensors").exists()
    assert found["command"].endswith("--merges lora --results RESULTS --keep KEEP")
    assert not (tmp_path / "kept" / "revision").exists()
