"""A manifest that was tampered with: every edit is a difference or an error of ours, with its place; never a crash."""

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.draw import mutated_json
from tests.helpers.docs_fixture import write_adapter
from tests.helpers.merging import Family, actmat, flip

from actmat.api.merging import merge
from actmat.errors import CheckpointError, MergeError
from actmat.extras.collect.outputs import recipe_of_output
from actmat.report.manifest import manifest_content, read_manifest
from actmat.report.verify import verify

NAME = "actmat_manifest.json"
KINDS = ("model", "adapter")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A merged model with its report, and a merged adapter."""
    family = Family.make(tmp_path_factory.mktemp("merged"))
    actmat(family.argv("--diagnose"), code=0)
    for t in (0, 1):
        write_adapter(family.root / f"lora{t}", seed=t)
    lora = [x for t in (0, 1) for x in ("-e", str(family.root / f"lora{t}"))]
    actmat(["merge", *lora, "--out", family.root / "adapter", "--quiet"], code=0)
    return {"model": family.out, "adapter": family.root / "adapter"}


@pytest.fixture
def out(merged: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the merged model, at the same depth below the inputs."""
    place = merged["model"].parent / f"copy-{tmp_path.name}"
    shutil.copytree(merged["model"], place, dirs_exist_ok=True)
    return place


def edit(out: Path, change: Callable[[dict[str, Any]], object], *, hashed: bool = False) -> None:
    """Edit the manifest; `hashed` gives it a content hash that fits."""
    manifest = json.loads((out / NAME).read_text())
    change(manifest)
    if hashed:
        manifest["content"] = manifest_content(manifest)
    (out / NAME).write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_unchecked_of_an_untouched_merge(merged: dict[str, Path], kind: str) -> None:
    found = verify(merged[kind])
    assert (found.problems, found.unchecked) == ((), ())
    names = {p.name for p in merged[kind].iterdir()} - {NAME}
    manifest = read_manifest(merged[kind])
    recorded = {*manifest["output"]["side_files"], *manifest["timing"].get("reports", ())}
    assert names == recorded | set(manifest["output"]["files"])
    assert found.files == len(recorded)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "README.md", "report.json", "report.html"])
def test_a_changed_file(out: Path, name: str) -> None:
    flip(out / name, -2)
    assert verify(out).problems == (f"file '{name}' of the output has changed since the merge",)
    (out / name).write_bytes((out / name).read_bytes() + b"\n")
    assert "bytes, the merge wrote" in verify(out).problems[0]
    (out / name).unlink()
    assert "missing" in verify(out).problems[0]


def test_extra_files(out: Path) -> None:
    (out / "modeling.py").write_text("import os")
    (out / "sub").mkdir()
    (out / "sub" / "more.py").write_text("")
    (out / "link").symlink_to("/")
    (out / ".gitattributes").write_text("*.safetensors filter=lfs")
    found = verify(out)
    extra = [f"the output has an extra file '{n}'" for n in ("link", "modeling.py", "sub/more.py")]
    assert list(found.problems) == extra
    assert found.unchecked == (".gitattributes of the output: git and hubs change it",)


def test_a_weight_file_under_the_same_bytes_with_another_shape(out: Path) -> None:
    file = out / "model.safetensors"
    data = file.read_bytes()
    assert data.count(b"[20,8]") == 2
    file.write_bytes(data.replace(b"[20,8]", b"[8,20]"))
    found = verify(out)
    assert any("is float32 [8, 20], the merge wrote float32 [20, 8]" in p for p in found.problems)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "recipe": lambda m: m["recipe"].update(scale=0.5),
    "a new note": lambda m: m["notes"].append({"severity": "note", "code": "", "text": "all is well"}),
    "file": lambda m: m["output"]["side_files"].pop("config.json"),
    "stats": lambda m: m["tensors"][0]["stats"].update(rank=1),
    "location": lambda m: m["experts"][0].update(from_here="../expert1"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_manifest(out: Path, what: str) -> None:
    edit(out, EDITS[what])
    assert any("the manifest was edited" in p for p in verify(out).problems)


HIDDEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no experts": (lambda m: m.update(experts=[]), "experts"),
    "fewer experts": (lambda m: m["experts"].pop(), "1 are listed, the recipe has 2"),
    "hash of an input": (lambda m: m["tensors"][3]["input_hashes"].pop("expert1"), "tensors.3"),
    "all hashes of inputs": (lambda m: [r.pop("input_hashes") for r in m["tensors"]], "input_hashes"),
    "hash of the base": (lambda m: m["tensors"][0]["input_hashes"].pop("base"), "'base' is missing"),
    "sources": (lambda m: m["tensors"][0].pop("sources"), "not recorded"),
    "all files": (lambda m: m["output"].pop("side_files"), "output.side_files"),
    "a file outside": (lambda m: m["output"]["files"].update({"../x": 1}), "relative path"),
    "a tensor twice": (lambda m: m["tensors"].append(m["tensors"][0]), "listed 2 times"),
    "an expert called base": (lambda m: m["experts"][0].update(name="base"), "name of the base"),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_inputs_cannot_be_taken_off_the_record(out: Path, what: str) -> None:
    change, says = HIDDEN[what]
    edit(out, change, hashed=True)
    with pytest.raises(CheckpointError, match="is damaged") as error:
        verify(out)
    assert any(says in p for p in error.value.problems), error.value.problems


def test_every_problem_is_listed_with_its_place(out: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"][2]["shape"] = "8x8"
        manifest["experts"][1]["content"] = 7
        del manifest["output"]["files"]

    edit(out, change)
    with pytest.raises(CheckpointError) as error:
        read_manifest(out)
    assert [p.split(":")[0] for p in error.value.problems] == ["experts.1.content", "output.files", "tensors.2.shape"]


def test_what_is_not_checked_is_printed(out: Path) -> None:
    done = actmat(["verify", out, "--no-inputs"], code=0)
    assert "not checked: inputs base, expert0, expert1: not requested" in done.out.replace("\n", " ")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_mutated_manifests_give_a_verdict_or_an_error_of_ours(merged: dict[str, Path], kind: str, seed: int) -> None:
    place = merged[kind].parent / f"mutated-{kind}-{seed}"
    shutil.copytree(merged[kind], place)
    original = json.loads((place / NAME).read_text())
    rng = random.Random(seed)
    errors = verdicts = 0
    for _ in range(50):
        changed = mutated_json(rng, original)
        if rng.random() < 0.5:  # an adversary makes the hash fit
            with contextlib.suppress(CheckpointError):
                changed["content"] = manifest_content(changed)
        (place / NAME).write_text(json.dumps(changed))
        try:
            found = verify(place, inputs=rng.random() < 0.3)
        except CheckpointError:
            errors += 1
        else:
            same = {k: v for k, v in changed.items() if k != "timing"} == {
                k: v for k, v in original.items() if k != "timing"
            }
            assert found.problems or same or changed.get("content") != original["content"]
            verdicts += 1
        with contextlib.suppress(MergeError):
            recipe_of_output(place)
    assert errors > 10
    assert verdicts > 2


@pytest.mark.parametrize("depth", [700, 900, 950, 970, 990])
def test_a_deep_manifest(out: Path, depth: int) -> None:
    text = (out / NAME).read_text().replace('"notes": ', '"more": ' + "[" * depth + "]" * depth + ', "notes": ', 1)
    (out / NAME).write_text(text)
    with contextlib.suppress(CheckpointError):
        assert not verify(out).ok


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"actmat_manifest": 1}',
        '{"actmat_manifest": ' + "1" * 5000 + "}",
        '{"a": 1, "a": 2}',
        "\xff",
    ],
)
def test_manifests_that_are_no_json_of_ours(out: Path, text: str) -> None:
    (out / NAME).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(out)
    done = actmat(["verify", out])
    assert (done.code, NAME in done.err) == (1, True)
    (out / NAME).unlink()
    with pytest.raises(CheckpointError, match="no actmat_manifest"):
        verify(out)


def test_inputs_are_named_as_they_were_given_and_no_folder_above_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family.make(tmp_path / "home" / "me" / "models", layers=1)
    linked = family.experts[1] / "model.safetensors"
    linked.rename(linked.with_name("weights.blob"))
    linked.symlink_to("weights.blob")
    monkeypatch.chdir(family.root)
    experts = ["./expert0/model.safetensors", "expert1"]
    merge("base", experts, out="out", durable=False)
    text = (family.root / "out" / NAME).read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    manifest = json.loads(text)
    files = [[f["path"] for f in row["files"]] for row in (manifest["base"], *manifest["experts"])]
    assert files == [["base/model.safetensors"], ["expert0/model.safetensors"], ["expert1/weights.blob"]]
    assert merge("base", experts, out="out", durable=False).was_finished
    edit(family.root / "out", lambda m: m["timing"].update(plan="of other inputs"))
    with pytest.raises(MergeError, match="files of its inputs"):
        merge("base", experts, out="out", durable=False)
