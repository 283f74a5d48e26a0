"""Commands on remote inputs: the bytes of a local merge, few requests, resumed merges, adapters, the hub."""

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers.adapters import save_adapter
from tests.helpers.hub import HubStandIn, hub_stand_in
from tests.helpers.located import open_expert
from tests.helpers.merging import Family, actmat, hidden, weights
from tests.helpers.range_server import RangeServer

from actmat.checkpoints import ranges
from actmat.checkpoints.resolve import open_handle, open_model
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.errors import CheckpointError
from actmat.experts.locate import open_handle as open_expert_handle
from actmat.extras.remote import retry

THREADS = ("--threads", "2")


def inputs(server: RangeServer, family: Family) -> list[str]:
    """Flags for a family below the server's root."""
    url = [f"{server.url}/{p.name}" for p in (family.base, *family.experts)]
    return ["--base", url[0], *(x for e in url[1:] for x in ("--expert", e))]


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 512)
    monkeypatch.setattr(ranges, "SMALL_BYTES", 256)


@pytest.fixture
def family(server: RangeServer, tmp_path: Path) -> Family:
    return Family.make(tmp_path, layers=4)


@pytest.mark.usefixtures("small_ranges")
def test_a_merge_over_http_has_the_bytes_of_a_local_one(
    server: RangeServer, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in ([], ["--method", "ties"]):
        out = tmp_path / f"out{len(flags)}{flags[:1]}"
        near = tmp_path / f"near{len(flags)}{flags[:1]}"
        actmat(family.argv("--out", str(near), *flags), code=0)
        actmat(["merge", *inputs(server, family), "--out", out, *THREADS, *flags], code=0)
        assert weights(out) == weights(near)
        ours, theirs = (json.loads((p / MANIFEST_NAME).read_text()) for p in (out, near))
        assert ours["tensors"] == theirs["tensors"]
        assert ours["base"]["files"][0]["path"] == f"{server.url}/base/model.safetensors"
    actmat(["verify", out], code=0)
    server.etags["expert0/model.safetensors"] = '"other"'
    actmat(["verify", out], code=0)


def test_planning_inspecting_and_diagnosing_read_headers(server: RangeServer, family: Family, tmp_path: Path) -> None:
    size = (family.base / "model.safetensors").stat().st_size
    server.reset()
    server.root = tmp_path
    planned = actmat(["plan", *inputs(server, family), "--json", "--full"], code=0)
    local = json.loads(actmat(family.argv("--json", "--full", command="plan")).out)
    assert json.loads(planned.out)["items"] == local["items"]
    for name in ("base", "expert0", "expert1"):
        found = server.of(f"{name}/model.safetensors")
        assert len(found) <= 3, "one for each family of adapters to see if it is one, one for the header"
        assert all(r.start == 0 for r in found)
    shown = actmat(["inspect", f"{server.url}/base"], code=0)
    assert "llama" in shown.out
    server.reset()
    server.root = tmp_path
    actmat(["diagnose", *inputs(server, family), "--quiet", *THREADS], code=0)
    assert sum(r.sent for r in server.of("expert0/model.safetensors")) < 4 * size


@pytest.mark.usefixtures("small_ranges")
def test_a_merge_that_is_stopped_goes_on_and_one_of_changed_inputs_starts_anew(
    server: RangeServer, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "ATTEMPTS", 2)
    actmat(family.argv("--out", str(tmp_path / "local")), code=0)
    out = tmp_path / "out"
    argv = ["merge", *inputs(server, family), "--out", str(out), "--threads", "1"]

    def fail(path: str, number: int, start: int) -> str:
        return "503" if path == "expert1/model.safetensors" and number > 8 else ""

    server.fault = fail
    stopped = actmat(argv, code=1)
    assert "expert1/model.safetensors" in stopped.err.replace("\n", "")
    assert "tensors are kept" in stopped.err
    assert not out.exists()
    server.fault = lambda path, number, start: ""
    assert "interrupted merge" in actmat(argv, code=0).err
    assert weights(out) == weights(tmp_path / "local")
    shutil.rmtree(out)

    server.counts.clear()
    server.fault = fail
    actmat(argv, code=1)
    server.fault = lambda path, number, start: ""
    family.change(family.experts[1], lambda t: t["lm_head.weight"].mul_(2))
    done = actmat(argv, code=0)
    assert "interrupted merge" not in done.err
    actmat(family.argv("--out", str(tmp_path / "local"), "--overwrite"), code=0)
    assert weights(out) == weights(tmp_path / "local")
    assert not [n for n in hidden(tmp_path) if n.startswith(".out.")]


def test_adapters_are_downloaded_once(server: RangeServer, tmp_path: Path) -> None:
    for seed, name in enumerate(("math", "code")):
        save_adapter(tmp_path / name, "llama", seed)
    server.reset()
    server.root = tmp_path
    urls = [x for n in ("math", "code") for x in ("-e", f"{server.url}/{n}")]
    shown = actmat(["inspect", f"{server.url}/math"], code=0)
    assert "LoRA adapter" in shown.out
    actmat(["merge", *urls, "--out", tmp_path / "far", "--quiet"], code=0)
    local = [x for n in ("math", "code") for x in ("-e", str(tmp_path / n))]
    actmat(["merge", *local, "--out", tmp_path / "near", "--quiet"], code=0)
    assert weights(tmp_path / "far") == weights(tmp_path / "near")
    actmat(["inspect", f"{server.url}/math/adapter_model.safetensors"], code=0)
    (tmp_path / "math" / "adapter_model.safetensors").unlink()
    torch.save({}, tmp_path / "math" / "adapter_model.bin")
    refused = actmat(["inspect", f"{server.url}/math"], code=1)
    assert "torch file" in refused.err


def test_a_handle_of_an_adapter_names_the_versions_of_its_files(server: RangeServer, tmp_path: Path) -> None:
    """Another process must merge the adapter that was planned with."""
    save_adapter(tmp_path / "math", "llama", 0)
    with open_expert(f"{server.url}/math", None) as expert:
        handle = pickle.loads(pickle.dumps(expert.handle()))
        name = next(iter(expert.specs))
        expected = expert.read(name)
    ((file, size, _),) = handle.etags
    assert (file, size) == ("adapter_model.safetensors", (tmp_path / "math" / file).stat().st_size)
    with open_expert_handle(handle) as again:
        assert torch.equal(again.read(name), expected)
    server.etags[f"math/{file}"] = '"other"'
    with pytest.raises(CheckpointError, match=rf"{file}.*changed since it was opened"):
        open_expert_handle(handle)
    with open_expert(str(tmp_path / "math"), None) as near:
        assert near.model.tensors.handle().etags == ()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    with hub_stand_in(monkeypatch, tmp_path / "cache") as stand_in:
        yield stand_in


def test_the_hub_is_read_by_ranges_at_a_pinned_commit(hub: HubStandIn, tmp_path: Path) -> None:
    family = Family.make(tmp_path)
    commit = hub.add("org/base", family.base)
    with open_model("hf://org/base") as found:
        handle = found.tensors.handle()
        assert handle.address == f"hf://org/base@{commit}"
        assert handle.streams
        hub.add("org/base", family.experts[0])  # the branch moves
        with open_handle(handle) as again, open_model(family.base) as near:
            for name in near.specs:
                assert torch.equal(found.tensors.read(name), near.tensors.read(name))
                assert torch.equal(again.read(name), near.tensors.read(name))
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "no weights in the cache"
    hub.add("org/math", family.experts[0])
    hub.add("org/code", family.experts[1])
    hub.add("org/base", family.base)
    argv = ["merge", "-b", "hf://org/base", "-e", "hf://org/math", "-e", "hf://org/code", "--quiet"]
    actmat([*argv, "--out", tmp_path / "far"], code=0)
    actmat(family.argv("--out", str(tmp_path / "near")), code=0)
    assert weights(tmp_path / "far") == weights(tmp_path / "near")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_hub_without_ranges_is_refused_when_tensors_are_read(hub: HubStandIn, tmp_path: Path) -> None:
    family = Family.make(tmp_path)
    hub.add("org/base", family.base)
    with open_model("hf://org/base") as found:
        hub.honors_ranges = False
        with pytest.raises(CheckpointError, match="ignored a range request"):
            found.tensors.read("lm_head.weight")
