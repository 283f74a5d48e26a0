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
from benchmarks.comparison.inputs import EXPERTS, random_tensor
from benchmarks.comparison.merges import INPUTS, MERGES
from benchmarks.comparison.outputs import compare_files, compare_json, compare_texts, compare_weights
from safetensors.torch import save_file
from tests.helpers.repository import ROOT
from tests.tolerances import F32_PRODUCT

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


def test_variants_are_compared_folder_by_folder(tmp_path: Path) -> None:
    for side, values in (("old", (1.0, 2.0)), ("new", (1.0, 3.0))):
        for name, value in zip(("ties", "dare"), values, strict=True):
            output(tmp_path / side / name, a=torch.tensor([value]))
    found = compare_weights(tmp_path / "old", tmp_path / "new")
    assert (found.files, found.same_files, found.tensors, found.same_tensors) == (2, 1, 6, 5)


def test_an_output_without_weights_does_not_pass(tmp_path: Path) -> None:
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
    assert compare_weights(tmp_path / "old", tmp_path / "new").verdict() not in against.PASSES


# other files


def test_json_is_compared_key_by_key() -> None:
    before = {"n": 1, "tensors": [{"m": "ties", "seconds": 1}, {"m": "ties"}], "gone": None, "timing": {"a": 1}}
    after = {"n": 1.0, "tensors": [{"m": "dare", "seconds": 2}, {"m": "dare"}], "more": [], "timing": {"a": 2}}
    assert compare_json(before, after) == ["gone (1 gone)", "more (1 new)", "n (1 changed)", "tensors[].m (2 changed)"]
    assert compare_json(before, before) == []


def test_files_are_compared_but_for_the_folders_names(tmp_path: Path) -> None:
    for side, rank in (("old", 8), ("new", 16)):
        folder = output(tmp_path / side)
        (folder / "README.md").write_text(f"merged into {folder}\n")
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "out": str(folder)}))
        (folder / f"{side}.txt").write_text("")
    found = compare_files(tmp_path / "old", tmp_path / "new")
    assert found == ["adapter_config.json: r (1 changed)", "new.txt: only in new", "old.txt: only in old"]
    assert compare_texts("one", "two") == "another text"


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


def test_inputs_have_the_spectrum_that_is_asked_for() -> None:
    for shape in ((30, 10), (10, 30), (2, 10, 30)):
        matrix = random_tensor("x", shape, 0.5)
        assert matrix.square().mean().item() == pytest.approx(1, rel=F32_PRODUCT)
        values = torch.linalg.svdvals(matrix)
        assert (values[..., 0] / values[..., 3]).flatten().tolist() == pytest.approx(
            [2.0] * (values.numel() // 10), rel=F32_PRODUCT
        )


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
def test_a_judgement_waits_for_the_interval(old: list[float], new: list[float], judged: str) -> None:
    row = timings.ratio_row(old, new)
    assert row["judged"] == judged
    assert (row["old"], row["all_new"]) == (1.0, new)


def test_a_row_for_reading_has_units() -> None:
    row = {"merge": "ties", "measure": "peak_anonymous_b", "old": 1 << 30, "new": 1 << 29}
    shown = timings.readable(row)
    assert (shown["measure"], shown["old"], shown["new"]) == ("peak anonymous, GiB", 1.0, 0.5)
    assert timings.readable(row | {"measure": "wall_s", "old": 2.0})["old"] == 2.0


def test_the_widest_rows_fit_80_columns() -> None:
    widest = max((merge.name for merge in MERGES), key=len)
    row = {"merge": widest, "files": "10/10", "tensors": "100/100", "entries": 1_000_000, "difference": 1.23456e-05}
    table = against.bytes_table([row | {"verdict": "same tensors", "notes": []}])
    timed = timings.ratio_row([1.2345e-3] * 3, [1.2345e-3] * 3) | {"merge": "task_arithmetic", "measure": "wall_s"}
    for line in [*table.splitlines(), *against.speed_table([timed]).splitlines()]:
        assert len(line) <= 80, line


@pytest.mark.parametrize("flags", [["--merges", "nonsense"], ["--expected", "full,nonsense"]])
def test_an_unknown_merge_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = against.parser()
    known = [merge.name for merge in MERGES]
    with pytest.raises(SystemExit):
        against.chosen(parser, flags[1], known)
    assert "nonsense; there are: full, " in capsys.readouterr().err
    assert against.chosen(parser, "tsv,full", known) == ["tsv", "full"]
    assert against.chosen(parser, None, known) == known


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
