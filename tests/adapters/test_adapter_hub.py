"""Adapters on the hub: a stand-in on the loopback serves them, and counts what was asked of it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.adapters.test_adapter_to_adapter import deltas_of, merge
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.checkpoint_files import save_folder, save_lora
from tests.helpers.hub import HubStandIn
from tests.helpers.located import is_adapter, open_adapter

import actmat
from actmat.errors import CheckpointError, MergeError
from actmat.report.manifest import read_manifest
from actmat.report.verify import verify


def publish(hub: HubStandIn, folder: Path, name: str, seed: int, *, branch: str = "main") -> str:
    """An adapter as trainers leave it on the hub: weights twice, and much that a merge has no use for."""
    save_adapter(folder, "llama", seed, **LLAMA)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    for extra in ("README.md", "tokenizer.json", "training_args.bin", "optimizer.pt"):
        (folder / extra).write_bytes(extra.encode() * 100)
    return hub.add(name, folder, branch=branch)


def test_only_card_config_and_one_weight_file_are_fetched_once(hub: HubStandIn, tmp_path: Path) -> None:
    for n in (1, 2):
        publish(hub, tmp_path / f"repo{n}", f"org/a{n}", n)
    plan = actmat.plan(None, ["org/a1", "org/a2"])
    assert len(plan.items) == 6
    merge(tmp_path, ["org/a1", "org/a2"], method="average")
    fetched = [path.rpartition("/")[2] for method, path, sent in hub.requests if method == "GET" and sent]
    files = sorted(name for name in fetched if "." in name)
    wanted = ("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    assert files == [name for name in wanted for _ in range(2)]  # the first for its license
    one, two, found = (deltas_of(tmp_path / n, "llama") for n in ("repo1", "repo2", "out"))
    for name, delta in found.items():
        assert float((delta - (one[name] + two[name]) / 2).norm()) <= 1e-12
    assert verify(tmp_path / "out").ok


def test_the_record_names_the_commit_and_verify_reads_that_one(hub: HubStandIn, tmp_path: Path) -> None:
    first = publish(hub, tmp_path / "repo", "org/a", 1)
    tiny("llama").save_pretrained(tmp_path / "base")
    hub.add("org/base", tmp_path / "base")
    actmat.merge("org/base", ["org/a"], out=tmp_path / "out", method="average", durable=False, threads=1)
    publish(hub, tmp_path / "later", "org/a", 2)  # the branch moves on
    manifest = read_manifest(tmp_path / "out")
    assert manifest["experts"][0]["commit"] == first
    assert len(manifest["base"]["commit"]) == 40
    assert verify(tmp_path / "out").ok


def test_a_stack_names_the_commits_of_its_parts(hub: HubStandIn, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "one")
    first = hub.add("org/one", tmp_path / "one")
    tiny("llama").save_pretrained(tmp_path / "local")
    actmat.merge("org/one[0:2] + local[1:2]", [], out=tmp_path / "out", durable=False, threads=1)
    model = tiny("llama")
    model.lm_head.weight.data.add_(1.0)
    model.save_pretrained(tmp_path / "later")
    hub.add("org/one", tmp_path / "later")  # the branch moves on
    assert read_manifest(tmp_path / "out")["base"]["pinned"] == f"hf://org/one@{first}[0:2] + local[1:2]"
    assert verify(tmp_path / "out").ok


def test_a_revision_is_a_branch_or_a_commit(hub: HubStandIn, tmp_path: Path) -> None:
    first = publish(hub, tmp_path / "one", "org/a", 1)
    publish(hub, tmp_path / "two", "org/a", 2, branch="next")
    for revision, folder in ((first, "one"), ("next", "two")):
        with open_adapter(f"org/a@{revision}") as found, open_adapter(tmp_path / folder) as local:
            assert not found.problems
            assert found.hashes == local.hashes
    with pytest.raises(CheckpointError, match="nowhere"):
        open_adapter("org/a@nowhere")


def test_a_repository_of_a_full_model_is_no_adapter(hub: HubStandIn, tmp_path: Path) -> None:
    publish(hub, tmp_path / "repo", "org/a", 1)
    shutil.copytree(tmp_path / "repo", tmp_path / "both")
    tiny("llama").save_pretrained(tmp_path / "both")
    hub.add("org/both", tmp_path / "both")
    assert is_adapter("org/a")
    assert not is_adapter("org/both")
    with pytest.raises(MergeError, match="--base must be given: both"):
        merge(tmp_path, ["org/a", "org/both"])


def test_a_plan_transfers_headers_only_and_records_name_the_repository(hub: HubStandIn, tmp_path: Path) -> None:
    """Of weights larger than what is read for a header."""
    names = ["org/wide0", "org/wide1"]
    for n, name in enumerate(names):
        factors = torch.full((1, 300_000), 1.0 + n), torch.tensor([[1.0], [2.0 + n]])
        hub.add(name, place := save_lora(tmp_path / "remote" / name, {"q": factors}))
    size = (place / "adapter_model.safetensors").stat().st_size
    actmat.plan(None, names, method="average")
    assert 0 < hub.bytes_of("adapter_model.safetensors") < size
    merge(tmp_path, names, method="average")
    assert hub.bytes_of("adapter_model.safetensors") > size
    files = [expert["files"][0]["path"] for expert in read_manifest(tmp_path / "out")["experts"]]
    assert files == [f"{name}/adapter_model.safetensors" for name in names]
    assert verify(tmp_path / "out", inputs=True).ok


@pytest.mark.parametrize(
    ("named", "is_said"), [("org/base", False), ("/data/base/", False), ("org/other", True), ("", False)]
)
def test_an_adapter_that_names_another_base_is_told(hub: HubStandIn, tmp_path: Path, named: str, is_said: bool) -> None:
    hub.add("org/base", save_folder(tmp_path / "base", {"q.weight": torch.ones(3, 4)}, {"model_type": "llama"}))
    factors = torch.ones(1, 4), torch.ones(3, 1)
    adapter = save_lora(tmp_path / "adapter", {"q": factors}, base_model_name_or_path=named)
    notes = " ".join(map(str, actmat.plan("org/base", [adapter], method="average", output={"kind": "model"}).notes))
    said = "adapters name another base (adapter: org/other): unless it is a copy of org/base, the merge is wrong"
    assert (said in notes) == ("another base" in notes) == is_said
