"""Two merges compared: distances against dense oracles, what differs in recipes, which merges are refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import save_adapter
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.docs_fixture import write_adapter
from tests.helpers.merging import EMBEDDING, NORM, Q0, UP0, Family, actmat
from tests.report.test_manifest import edit
from tests.tolerances import F64_ORACLE

from actmat.checkpoints.resolve import open_model
from actmat.errors import AlignmentError, CheckpointError
from actmat.extras.pages import comparison
from actmat.extras.pages.comparison import Difference, MergeComparison, TensorDifference, compare
from actmat.report.manifest import read_manifest


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Three merges of two experts: `actmat` and `ties` with reports, `plain` (task arithmetic) without."""
    made = Family.make(tmp_path_factory.mktemp("merges"))
    merge(made, "actmat", "--diagnose")
    merge(made, "ties", "--diagnose", "--option", "density=0.3", "--scale", "0.5", "--keep", NORM)
    merge(made, "task_arithmetic", "--dtype", "bfloat16")
    return made


def merge(family: Family, method: str, *flags: str, out: str | None = None) -> Path:
    place = family.root / (out or method)
    argv = [*family.argv(command="plan")[1:], "--out", str(place), "--threads", "1", "--quiet", "-m", method, *flags]
    actmat(["merge", *argv], code=0)
    return place


def between(family: Family, first: str, second: str) -> MergeComparison:
    return compare(family.root / first, family.root / second)


def test_distances_are_those_of_the_stored_weights(family: Family) -> None:
    found = {t.name: t for t in between(family, "actmat", "task_arithmetic").tensors}
    base, one, two = (
        {n: v.double() for n, v in load_file(family.root / f / "model.safetensors").items()}
        for f in ("base", "actmat", "task_arithmetic")
    )
    for name in base:
        t = found[name]
        d_one, d_two = one[name] - base[name], two[name] - base[name]
        apart = float((one[name] - two[name]).norm())
        assert t.distance == pytest.approx(apart, rel=F64_ORACLE)
        assert t.norms == pytest.approx((float(d_one.norm()), float(d_two.norm())), rel=F64_ORACLE)
        assert t.relative == pytest.approx(2 * apart / float(d_one.norm() + d_two.norm()), rel=F64_ORACLE)


def test_reading_is_in_chunks_of_bounded_size(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = between(family, "actmat", "ties")
    monkeypatch.setattr(comparison, "CHUNK", 7)
    read, chunk = list[int](), comparison._chunk

    def watched(*arguments: Any) -> torch.Tensor:
        values = chunk(*arguments)
        read.append(len(values))
        return values

    monkeypatch.setattr(comparison, "_chunk", watched)
    for t, whole in zip(between(family, "actmat", "ties").tensors, expected.tensors, strict=True):
        assert t.name == whole.name
        assert t.distance == pytest.approx(whole.distance, rel=F64_ORACLE)
    assert max(read) == 7


def test_the_same_merge_differs_nowhere(family: Family) -> None:
    found = between(family, "actmat", "actmat")
    assert (found.tensors, found.relative, found.settings, found.compared) == ((), 0.0, (), 11)


def test_settings_that_differ(family: Family) -> None:
    found = {s.name: (s.first, s.second) for s in between(family, "actmat", "ties").settings}
    assert found == {
        "method": ("actmat", "ties"),
        "options.density": (None, 0.3),
        "scale": (None, 0.5),
        "keep": (None, [NORM]),
    }


def test_notes_of_a_recipe_are_no_settings(family: Family, tmp_path: Path) -> None:
    """Such as the reason of `auto`."""
    outs = []
    for name in ("one", "other"):
        outs.append(shutil.copytree(family.root / "actmat", tmp_path / name))
        edit(outs[-1], lambda m, n=name: m["recipe"].update(notes=[f"auto: {n}"]))
    assert compare(*outs).settings == ()


def test_experts_are_told_by_their_contents(family: Family) -> None:
    expert0, expert1 = family.experts
    place = family.root / "renamed"
    flags = ["--expert", f"b={expert1}", "--expert", f"a={expert0}", "-w", "2", "-w", "1", "-m", "linear"]
    actmat(["merge", "--base", family.base, *flags, "--out", place, "--quiet"], code=0)
    found = compare(family.root / "actmat", place)
    assert found.experts == (("expert0", "a"), ("expert1", "b"))
    settings = {s.name: (s.first, s.second) for s in found.settings}
    assert settings["order of experts"] == ("expert0, expert1", "expert1, expert0")
    assert settings["weight of expert1"] == (1.0, 2.0)


def test_without_the_base_nothing_is_compared(family: Family, tmp_path: Path) -> None:
    places = []
    for name in ("actmat", "task_arithmetic"):
        places.append(shutil.copytree(family.root / name, tmp_path / name))
        edit(places[-1], lambda m: m["base"].update(location=str(tmp_path / "gone"), from_here="../gone"))
    with pytest.raises(CheckpointError, match="gone"):
        compare(*places)


def test_other_bases_and_experts_are_refused_with_all_differences(family: Family, tmp_path: Path) -> None:
    other = Family.make(tmp_path)
    other.change(other.base, lambda t: t[UP0].add_(1))
    other.change(other.experts[0], lambda t: t[Q0].mul_(2))
    merge(other, "actmat")
    with pytest.raises(AlignmentError) as error:
        compare(family.root / "actmat", other.root / "actmat")
    text = str(error.value)
    assert "not merges of the same base and experts" in text
    assert f"the bases differ: {family.base} and {other.base}" in text
    assert text.count("expert 'expert0' of ") == 2
    assert len(error.value.problems) == 3


def test_another_set_of_experts_is_refused(family: Family, tmp_path: Path) -> None:
    third = shutil.copytree(family.experts[1], family.root / "third")
    family.change(third, lambda t: t[Q0].add_(1))
    argv = ["merge", "-b", str(family.base), "-e", str(family.experts[0]), "-e", str(third), "--quiet"]
    actmat([*argv, "--out", tmp_path / "out"], code=0)
    with pytest.raises(AlignmentError) as error:
        compare(family.root / "actmat", tmp_path / "out")
    assert error.value.problems == (
        f"expert 'expert1' of {family.root / 'actmat'} has no counterpart with equal tensors in {tmp_path / 'out'}",
        f"expert 'third' of {tmp_path / 'out'} has no counterpart with equal tensors in {family.root / 'actmat'}",
    )


def test_other_tensors_and_shapes_are_refused(family: Family, tmp_path: Path) -> None:
    place = tmp_path / "out"
    merge(family, "average", out=str(place))
    rows = read_manifest(place)["tensors"]
    rows = [r | ({"shape": [4, 16]} if r["name"] == Q0 else {}) for r in rows if r["name"] != NORM]
    edit(place, lambda m: m.update(tensors=rows))
    with pytest.raises(AlignmentError, match="2 tensors are not in both, or have different shapes"):
        compare(family.root / "actmat", place)


def test_an_output_that_lost_a_tensor_is_told(family: Family, tmp_path: Path) -> None:
    place = tmp_path / "out"
    merge(family, "average", out=str(place))
    tensors = load_file(place / "model.safetensors")
    del tensors[Q0]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"no tensor '{Q0}'"):
        compare(family.root / "actmat", place)


# Adapters


def test_adapters_are_compared_by_their_products(tmp_path: Path) -> None:
    for seed, name in enumerate(("math", "code")):
        write_adapter(tmp_path / name, seed=seed)
    inputs = [x for name in ("math", "code") for x in ("-e", str(tmp_path / name))]
    for method in ("actmat", "task_arithmetic"):
        actmat(["merge", *inputs, "-m", method, "--out", tmp_path / method, "--quiet"], code=0)
    found = compare(tmp_path / "actmat", tmp_path / "task_arithmetic")
    stored = [load_file(tmp_path / m / "adapter_model.safetensors") for m in ("actmat", "task_arithmetic")]
    assert len(found.tensors) == 4
    for t in found.tensors:
        key = f"base_model.model.{t.name}.lora_"
        one, two = (s[f"{key}B.weight"].double() @ s[f"{key}A.weight"].double() for s in stored)
        assert t.distance == pytest.approx(float((one - two).norm()), rel=F64_ORACLE)
        assert t.norms == pytest.approx((float(one.norm()), float(two.norm())), rel=F64_ORACLE)
    assert found.base is None
    model = merge(Family.make(tmp_path / "models"), "average")
    with pytest.raises(AlignmentError, match="is a merged adapter") as error:
        compare(tmp_path / "actmat", model)
    assert len(error.value.problems) == 2


def test_full_tensors_of_adapters_are_compared_by_their_entries(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_adapter(tmp_path / str(seed), "vit", seed, r=2, target_modules=["q_proj"], modules_to_save=["classifier"])
    inputs = ["-e", str(tmp_path / "1"), "-e", str(tmp_path / "2"), "-m", "linear"]
    for name, weight in (("one", "1"), ("two", "3")):
        argv = ["merge", *inputs, "-w", weight, "-w", "1", "--out", str(tmp_path / name), "--quiet"]
        actmat(argv, code=0)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    found = {t.name: t for t in compare(tmp_path / "one", tmp_path / "two").tensors}
    for name in ("classifier.weight", "classifier.bias"):
        stored = f"base_model.model.{name}"
        apart = float((one[stored].double() - two[stored].double()).norm())
        assert found[name].distance == pytest.approx(apart, rel=F64_ORACLE)
        norms = (float(one[stored].double().norm()), float(two[stored].double().norm()))
        assert found[name].norms == pytest.approx(norms, rel=F64_ORACLE), "there is no base to subtract"


def test_tied_tensors_are_counted_once(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    for folder in (family.base, *family.experts):
        edit_json(folder / "config.json", tie_word_embeddings=True)
        family.change(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    merge(family, "average")
    merge(family, "task_arithmetic", "--set", "scope=all")
    with open_model(family.root / "average") as stored:
        assert {EMBEDDING, "lm_head.weight"} <= stored.specs.keys()
        assert between(family, "average", "task_arithmetic").compared == len(stored.specs) - 1


def test_a_comparison_is_told_in_the_names_of_its_methods() -> None:
    tensors, changed = (TensorDifference("w", 1.0, (1.0, 1.0)),), (Difference("x", "1", None),)
    found = MergeComparison(("a/actmat", "b/ties"), ("actmat", "ties"), "base", (("e", "e"),), changed, 1, tensors)
    assert (found.names, found.relative, changed[0].row) == (("actmat", "ties"), 1.0, ["x", "1", "-"])
    assert replace(found, methods=("ties", "ties")).names == ("actmat", "ties")  # ends of the two places
    assert replace(found, methods=("ties", "ties"), outs=("a/x", "b/x")).names == ("first", "second")
