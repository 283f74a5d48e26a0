"""`actmat merge --average`, and merges without a base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.merging import EMBEDDING, Q0, Family, actmat, contents, expert_of, llama_tensors, save_checkpoint
from tests.tolerances import BF16_ROUNDING, F32_ELEMENTWISE, F32_PRODUCT, relative_error
from torch import Tensor

import actmat as library
from actmat.errors import MergeError, RecipeError
from actmat.planning.cost import SOURCE_BYTES

STEPS = (30, 200, 1000)


@pytest.fixture
def run(tmp_path: Path) -> list[Path]:
    """Checkpoints of a run, in the order in which a shell lists them: step-1000, step-200, step-30."""
    base = llama_tensors(1)
    folders = [save_checkpoint(tmp_path / f"step-{n}", expert_of(base, n)) for n in STEPS]
    return sorted(folders, key=str)


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def weighted(tmp_path: Path, weights: list[float]) -> dict[str, Tensor]:
    """The sum in float64, checkpoints in the order of `STEPS`."""
    inputs = [tensors(tmp_path / f"step-{n}") for n in STEPS]
    return {k: sum(w * t[k].double() for w, t in zip(weights, inputs, strict=True)) for k in inputs[0]}


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ("uniform", [1 / 3] * 3),
        ("linear", [1 / 6, 2 / 6, 3 / 6]),
        ("ema:0.5", [1 / 7, 2 / 7, 4 / 7]),
        ("wsd", [3**-0.5, (2**0.5 - 1) * 3**-0.5, 1 - (2 / 3) ** 0.5]),
    ],
)
def test_the_average_is_that_of_the_checkpoints_in_the_order_of_their_steps(
    run: list[Path], tmp_path: Path, weights: str, wanted: list[float]
) -> None:
    out = tmp_path / "out"
    done = actmat(["merge", "--average", weights, *map(str, run), "--out", str(out), "--threads", "1"])
    assert done.code == 0, done
    found, expected = tensors(out), weighted(tmp_path, wanted)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value) < F32_ELEMENTWISE
    assert "step-30" in done.out.split("step-200")[0]
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "step-1000" / "tokenizer.json").read_bytes()


def test_the_plan_lists_order_weights_and_formula(run: list[Path]) -> None:
    shown = " ".join(actmat(["merge", "--average", "linear", *map(str, run), "--plan"]).out.split())
    assert "w_t = 2 t / (T (T + 1))" in shown
    assert "step-30 0.166667, step-200 0.333333, step-1000 0.5" in shown
    assert "come from the last checkpoint, step-1000" in shown


def test_listed_numbers_want_checkpoints_in_order(run: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"step-30.*step-200.*step-1000.*as_given"):
        library.average(run, weights=[0.2, 0.3, 0.5], out=tmp_path / "out")
    ordered = [tmp_path / f"step-{n}" for n in STEPS]
    library.average(ordered, weights=[0.2, 0.3, 0.5], out=tmp_path / "out", durable=False)
    backwards = library.average(run, weights=[0.5, 0.3, 0.2], as_given=True, out=tmp_path / "other", durable=False)
    wanted = weighted(tmp_path, [0.2, 0.3, 0.5])
    for folder in (tmp_path / "out", tmp_path / "other"):
        assert relative_error(tensors(folder)[Q0], wanted[Q0]) < F32_ELEMENTWISE
    assert backwards.plan.recipe.labels == ("step-1000", "step-200", "step-30")


def test_bytes_do_not_depend_on_workers_and_memory_not_on_the_number_of_checkpoints(tmp_path: Path) -> None:
    base = llama_tensors(1, dtype=torch.bfloat16)
    folders = [save_checkpoint(tmp_path / f"s{n}", expert_of(base, n)) for n in range(12)]
    reports = [
        library.average(folders, weights="ema:0.9", out=tmp_path / "out" / str(n), threads=n, durable=False)
        for n in (1, 3)
    ]
    one, three = (contents(r.out) for r in reports)
    assert one == three
    few = library.average(folders[:2], out=tmp_path / "few", durable=False)
    headers = len(few.plan.items) * (12 - 2) * SOURCE_BYTES
    assert reports[0].plan.peak_bytes(1) == few.plan.peak_bytes(1) + headers
    share = [0.9 ** (11 - t) for t in range(12)]
    wanted = sum(w * tensors(f)[Q0].double() for w, f in zip(share, folders, strict=True)) / sum(share)
    assert relative_error(tensors(reports[0].out)[Q0], wanted) < BF16_ROUNDING


def test_float64_accumulation_and_output(run: list[Path], tmp_path: Path) -> None:
    report = library.average(run, out=tmp_path / "out", dtype="float64", compute_dtype="float64", durable=False)
    assert relative_error(tensors(report.out)[Q0], weighted(tmp_path, [1 / 3] * 3)[Q0]) < 1e-15


def test_nothing_to_average_is_an_error(tmp_path: Path) -> None:
    assert actmat(["merge", "--average", "uniform"]).code == 1
    assert actmat(["merge", "--average", "uniform", str(tmp_path)]).code == 2
    with pytest.raises(RecipeError, match="needs at least two checkpoints"):
        library.average([], out=tmp_path / "out")


BASELESS = [("average", {}), ("linear", {}), ("linear", {"normalize": False}), ("karcher", {}), ("slerp", {"t": 0.3})]


@pytest.mark.parametrize(("method", "options"), BASELESS)
def test_a_merge_without_a_base_is_that_with_any(tmp_path: Path, method: str, options: dict[str, object]) -> None:
    family = Family.make(tmp_path, layers=1)
    common = {"method": method, "options": options, "scope": "all", "durable": False}
    with_base = library.merge(family.base, family.experts, out=tmp_path / "with", **common)
    without = library.merge(None, family.experts, out=tmp_path / "without", **common)
    found, wanted = tensors(without.out), tensors(with_base.out)
    for name in wanted:
        assert relative_error(found[name], wanted[name]) < F32_PRODUCT
    assert any("deltas are measured from expert 'expert0'" in n for n in map(str, without.plan.notes))
    assert json.loads((without.out / "tokenizer.json").read_text()) == {"made by": "expert0"}


def succeeds(argv: list[str]) -> None:
    """Run a command; a failure shows what it said, because a full disk or memory fails a command as well."""
    done = actmat(argv)
    assert done.code == 0, f"{argv}: {done.err}"


def test_command_line_and_recipe_take_no_base(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    flags = [x for e in family.experts for x in ("-e", str(e))]
    argv = ["merge", *flags, "-m", "linear", "-w", "3", "-w", "1", "--out", str(family.out), "--quiet"]
    succeeds(argv)
    first, second = (tensors(e)[EMBEDDING].double() for e in family.experts)
    assert relative_error(tensors(family.out)[EMBEDDING], (3 * first + second) / 4) < F32_ELEMENTWISE
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"experts: [{family.experts[0]}, {family.experts[1]}]\nmethod: slerp\n")
    succeeds(["merge", str(recipe), "--out", str(tmp_path / "by_recipe"), "--quiet"])
    succeeds(["plan", str(recipe)])
    succeeds(["verify", str(tmp_path / "by_recipe")])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "ties"}, "method 'ties' merges deltas from a base"),
        ({"method": "karcher", "options": {"include_base": True}}, "karcher without include_base"),
        ({"method": "linear", "scale": 0.5}, "'scale' is a factor of the delta"),
        ({"method": "linear", "keep": "*lm_head*"}, "'keep' copies"),
        ({"method": "linear", "postprocess": {"lines": [0.5, 1]}}, "post-processing"),
        ({"method": "linear", "rules": [{"match": "*q_proj*", "method": "tsv"}]}, "rules.0: method 'tsv'"),
        ({"method": "average", "vocabulary": "base"}, "vocabulary: base"),
    ],
)
def test_what_needs_a_base_says_so(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    family = Family.make(tmp_path, layers=1)
    with pytest.raises(MergeError, match="--base must be given") as error:
        library.merge(None, family.experts, out=family.out, **fields)
    assert said in str(error.value)


def test_slerp_of_one_expert_needs_the_other_end(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1, experts=1)
    done = actmat(["merge", "-e", str(family.experts[0]), "-m", "slerp", "--out", str(family.out)])
    assert done.code == 1
    assert "slerp between two experts" in " ".join(done.err.replace("│", " ").split())
