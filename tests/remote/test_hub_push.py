"""Outputs on the hub, `actmat push` and `--out hf://`: the real client library against a stand-in of its API."""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants, snapshot_download
from tests.helpers.docs_run import blocks
from tests.helpers.hub import HubStandIn, hub_stand_in
from tests.helpers.hub_uploads import Uploads
from tests.helpers.json_layouts import pinned
from tests.helpers.merging import Family, actmat
from tests.helpers.repository import ROOT

import actmat as package
from actmat.checkpoints.writing.listed import listed_files
from actmat.errors import OutputError
from actmat.extras.remote import push as hub_push
from actmat.extras.remote.push import hub_name

Models = tuple[Family, Path, Path]
SHARDS = ("--set", "max_shard_size=1kB")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A family, a merge of it in several shards, and another one."""
    family = Family.make(tmp_path_factory.mktemp("models"), layers=2)
    for out, flags in (("merged", SHARDS), ("other", ["--method", "average"])):
        actmat(family.argv("--out", str(family.root / out), "--quiet", *flags), code=0)
    return family, family.root / "merged", family.root / "other"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in speaks Git LFS
    with hub_stand_in(monkeypatch, tmp_path / "cache") as stand_in:
        stand_in.uploads = Uploads(tmp_path / "commits")
        monkeypatch.setenv("HF_TOKEN", stand_in.uploads.token)
        yield stand_in


@pytest.fixture
def uploads(hub: HubStandIn) -> Uploads:
    return hub.uploads


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".gitattributes"}


def head(hub: HubStandIn, repo: str = "org/merged") -> dict[str, bytes]:
    return content(hub.repositories[repo][hub.branches[repo, "main"]])


def test_a_push_is_one_private_commit_of_the_whole_output(
    hub: HubStandIn, uploads: Uploads, models: Models, tmp_path: Path
) -> None:
    _, merged, _ = models
    report = package.push(merged, "org/merged")
    assert head(hub) == content(merged)
    assert len(uploads.commits) == 1
    assert uploads.private == {"org/merged": True}
    assert report.is_new
    assert report.url.endswith(uploads.commits[0]["commit"])
    assert report.nbytes == sum(map(len, content(merged).values()))
    folder = snapshot_download("org/merged", local_dir=tmp_path / "fetched")
    assert package.verify(folder, inputs=False).ok
    assert package.verify("hf://org/merged", inputs=False).ok


def test_the_same_push_again_sends_nothing(hub: HubStandIn, uploads: Uploads, models: Models) -> None:
    package.push(models[1], "org/merged")
    sent = list(uploads.received)
    again = package.push(models[1], "hf://org/merged")
    assert (again.nbytes, {f.state for f in again.files}) == (0, {"same"})
    assert again.url.endswith(hub.branches["org/merged", "main"])
    assert uploads.received == sent
    assert len(uploads.commits) == 1


def test_an_interrupted_push_goes_on(hub: HubStandIn, uploads: Uploads, models: Models) -> None:
    uploads.breaks_after = 2
    stopped = actmat(["push", models[1], "org/merged"], code=1)
    assert "the same command goes on" in stopped.err
    assert head(hub) == {}, "nothing shows before the commit"
    uploads.breaks_after = None
    before = set(uploads.received)
    actmat(["push", models[1], "org/merged"], code=0)
    assert head(hub) == content(models[1])
    assert len(uploads.received) == len(set(uploads.received)), "no file was sent twice"
    assert len(before) == 2


def test_large_files_are_sent_in_parts(hub: HubStandIn, uploads: Uploads, models: Models) -> None:
    uploads.part_bytes = 1000
    package.push(models[2], "org/merged")
    assert head(hub) == content(models[2])
    assert len(uploads.received) == -(-(models[2] / "model.safetensors").stat().st_size // 1000)


def test_a_dry_run_lists_and_sends_nothing(hub: HubStandIn, uploads: Uploads, models: Models) -> None:
    done = actmat(["push", models[1], "org/merged", "--dry-run"], code=0)
    for name in content(models[1]):
        assert name in done.out
    assert "private, new" in done.out
    assert "nothing was sent" in done.out
    assert (hub.repositories, uploads.received) == ({}, [])
    found = pinned(json.loads(actmat(["push", models[1], "org/merged", "--dry-run", "--json"]).out), "push")
    assert {f["name"]: f["size"] for f in found["files"]} == {n: len(b) for n, b in content(models[1]).items()}


def test_another_output_is_replaced_only_when_asked(hub: HubStandIn, uploads: Uploads, models: Models) -> None:
    package.push(models[1], "org/merged")
    with pytest.raises(OutputError, match="finished output: choose another name, or pass --overwrite"):
        package.push(models[2], "org/merged")
    report = package.push(models[2], "org/merged", overwrite=True)
    assert head(hub) == content(models[2]), "the shards of the first are gone"
    assert any(name.startswith("model-0000") for name in report.removed)
    assert {f.name: f.state for f in report.files}["tokenizer.json"] == "same"
    assert "tokenizer.json" not in uploads.commits[-1]["paths"]


def test_the_visibility_is_never_a_surprise(hub: HubStandIn, uploads: Uploads, models: Models) -> None:
    told = package.push(models[2], "org/open", public=True).notes[-1]
    family = models[0]
    assert told.endswith(f"paths of this machine: {family.base}, {family.experts[0]}, {family.experts[1]}")
    assert uploads.private == {"org/open": False}
    with pytest.raises(OutputError, match="exists and is public: pass --public"):
        package.push(models[2], "org/open")
    assert package.push(models[2], "org/closed").notes == ()
    with pytest.raises(OutputError, match="exists and is private: remove --public"):
        package.push(models[2], "org/closed", public=True)


def test_foreign_weights_are_never_replaced(hub: HubStandIn, models: Models, tmp_path: Path) -> None:
    hub.add("org/merged", models[0].base)
    with pytest.raises(OutputError, match=r"actmat did not write \(model.safetensors\)"):
        package.push(models[2], "org/merged", overwrite=True, public=True)


def test_refusals_say_what_to_do(hub: HubStandIn, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = str(models[1])
    assert "your own namespace" in actmat(["push", merged, "other/merged"]).err
    assert "has no actmat_manifest.json" in actmat(["push", models[0].base, "org/x"]).err
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "log in (hf auth login)" in actmat(["push", merged, "org/merged"]).err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Fix: unset it" in actmat(["push", merged, "org/merged"]).err
    assert hub.repositories == {}


def test_a_damaged_output_stays_here_and_an_edited_card_does_not(
    hub: HubStandIn, models: Models, tmp_path: Path
) -> None:
    folder = tmp_path / "merged"
    shutil.copytree(models[2], folder)
    (folder / "LICENSE").write_text("mine")
    (folder / "notes.txt").write_text("private notes")
    card = folder / "README.md"
    card.write_text(card.read_text() + "\nMy words.\n")
    report = package.push(folder, "org/merged")
    assert report.left_out == ("notes.txt",)
    assert head(hub).keys() == content(folder).keys() - {"notes.txt"}
    assert b"My words." in head(hub)["README.md"]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(OutputError, match="modified after the merge"):
        package.push(folder, "org/damaged")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(OutputError, match=r"'tokenizer\.json' of the manifest is missing"):
        package.push(folder, "org/damaged", check=False)
    assert "org/damaged" not in hub.repositories


def test_a_merge_writes_to_the_hub_and_goes_on_after_a_stop(
    hub: HubStandIn, uploads: Uploads, models: Models, tmp_path: Path
) -> None:
    argv = [*models[0].argv("--out", "hf://org/merged"), *SHARDS]
    uploads.breaks_after = 1
    stopped = actmat(argv, code=1)
    assert "tensors are kept; the same command goes on" in stopped.err
    assert head(hub) == {}
    uploads.breaks_after = None
    actmat(argv, code=0)
    assert uploads.private == {"org/merged": True}
    assert not list((tmp_path / "cache" / "actmat").glob("**/*.safetensors")), "nothing is left here"
    ours, theirs = head(hub), content(models[1])
    names = {n for n in theirs if n not in ("actmat_manifest.json", "README.md")}
    assert {n: ours[n] for n in names} == {n: theirs[n] for n in names}, "the bytes of a local merge"
    assert len(uploads.received) == len(set(uploads.received))
    again = actmat([a for a in argv if a != "--quiet"])
    assert "already complete" in again.out
    assert len(uploads.commits) == 1
    refused = actmat([*argv, "--method", "average"], code=1)
    assert "pass --overwrite" in refused.err
    actmat([*argv, "--method", "average", "--overwrite"], code=0)
    assert head(hub) != ours


def test_a_merge_to_a_public_repository_is_refused_before_it_begins(
    hub: HubStandIn, uploads: Uploads, models: Models, tmp_path: Path
) -> None:
    package.push(models[2], "org/open", public=True)
    done = actmat(models[0].argv("--out", "hf://org/open", "--overwrite"), code=1)
    assert "exists and is public" in done.err
    assert not list((tmp_path / "cache" / "actmat").glob("**/*.safetensors"))


def test_a_commit_that_somebody_else_made_meanwhile_is_not_overwritten(
    hub: HubStandIn, uploads: Uploads, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actmat.extras.remote import push as writing

    package.push(models[1], "org/merged")
    place = writing.look_up("org/merged")
    package.push(models[2], "org/merged", overwrite=True)
    monkeypatch.setattr(writing, "look_up", lambda repo_id, needed: place)
    (models[2] / "LICENSE").write_text("new")
    try:
        with pytest.raises(OutputError, match="HTTP 412: the repository changed meanwhile"):
            package.push(models[2], "org/merged", overwrite=True)
    finally:
        (models[2] / "LICENSE").unlink()


@pytest.mark.parametrize(
    "text", ["org/name@main", "name", "s3://bucket/name", "hf://org/name/sub", "hf://datasets/a/b"]
)
def test_names_that_are_no_repository_are_refused(text: str) -> None:
    with pytest.raises(OutputError, match="expected a hub repository"):
        hub_name(text)


def test_a_damaged_manifest_names_no_file_outside_of_its_folder() -> None:
    found = {"output": {"files": {"../a": 1, "b": 2, 3: 4, "c/../d": 5, "e/f": 6}, "side_files": ["c"]}, "timing": "x"}
    assert listed_files(found) == ["b", "e/f"]


def test_files_in_folders_go_into_folders(hub: HubStandIn, models: Models, tmp_path: Path) -> None:
    from actmat.extras.remote.push import look_up, plan_push, send

    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "model_index.json").write_text("{}")
    output = {"files": {"unet/model.safetensors": 7}, "side_files": {"model_index.json": {}}}
    (tmp_path / "actmat_manifest.json").write_text(json.dumps({"output": output}))
    names = ["actmat_manifest.json", "model_index.json", "unet/model.safetensors"]
    send(plan_push(look_up("org/pipe"), tmp_path, names, private=True, overwrite=False), "pipeline")
    folder = hub.repositories["org/pipe"][hub.branches["org/pipe", "main"]]
    assert (folder / "unet" / "model.safetensors").read_bytes() == b"weights"
    again = plan_push(look_up("org/pipe"), tmp_path, names, private=True, overwrite=False)
    assert not again.changes


def test_the_commands_of_the_github_action_do_what_the_page_says(
    hub: HubStandIn, uploads: Uploads, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given,) = (b for b in blocks((ROOT / "docs" / "install.md").read_text()) if b.code.startswith("name: merge"))
    steps = yaml.safe_load(given.code)["jobs"]["merge"]["steps"]
    commands = [shlex.split(s["run"].replace("ORG", "org"))[1:] for s in steps if s.get("run", "").startswith("actmat")]
    assert [c[0] for c in commands] == ["plan", "merge", "diagnose", "verify", "push"]
    monkeypatch.chdir(tmp_path)
    family = models[0]
    recipe = {"base": str(family.base), "experts": [str(e) for e in family.experts], "method": "average"}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    for _ in range(2):  # the first run of the workflow, and one after a change
        for command in commands:
            actmat(command, code=0)
        assert Path(steps[-1]["with"]["path"]).is_file()
        assert head(hub).keys() >= {"model.safetensors", "actmat_manifest.json", "README.md"}
        shutil.rmtree("merged")  # a runner begins with nothing


def test_two_first_pushes_of_different_outputs_are_not_mixed(
    hub: HubStandIn, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one makes the repository, and commits, after this one has found none of its name."""
    real = hub_push.create

    def overtaken(place: hub_push.HubPlace, *, private: bool) -> None:
        monkeypatch.setattr(hub_push, "create", real)
        package.push(models[2], "org/merged")
        real(place, private=private)

    monkeypatch.setattr(hub_push, "create", overtaken)
    with pytest.raises(OutputError, match="it has a finished output"):
        package.push(models[1], "org/merged")
    assert head(hub) == content(models[2])
    again = actmat(["push", models[1], "org/merged", "--overwrite"])
    assert (again.code, head(hub)) == (0, content(models[1]))


def test_a_commit_while_the_first_push_sends_its_files_stops_it(
    hub: HubStandIn, uploads: Uploads, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = uploads._large

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(uploads, "_large", real)
        hub.add("org/merged", models[2])
        return real(*arguments)

    monkeypatch.setattr(uploads, "_large", overtaken)
    with pytest.raises(OutputError, match="the repository changed meanwhile"):
        package.push(models[1], "org/merged")
    assert head(hub) == content(models[2])
