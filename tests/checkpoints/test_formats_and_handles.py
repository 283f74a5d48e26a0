"""A format of a test enters the registry by one entry; handles open checkpoints again, also in another process."""

import json
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_sharded
from tests.helpers.hub import HubStandIn
from tests.helpers.plugged import plug
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorsHandle, TensorSpec, torch_dtype
from actmat.checkpoints.memory import MemoryTensors
from actmat.checkpoints.model import Format, stored_model
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_handle, open_model, open_tensors
from actmat.checkpoints.source import Source, TensorFiles
from actmat.errors import CheckpointError
from actmat.extras.conformance.tensors import TensorsConformance


class HexTensors(TensorFiles):
    """A toy: one JSON file of `name -> [dtype, shape, bytes in hexadecimal digits]`."""

    def __init__(self, source: Source, label: str) -> None:
        super().__init__(source, [label])
        stored = json.loads(source.fetch(label).read_text())
        self.specs = MappingProxyType({n: TensorSpec(n, tuple(s), d, label) for n, (d, s, _) in stored.items()})
        tensors = {}
        for name, (dtype, shape, digits) in stored.items():
            flat = torch.frombuffer(bytearray.fromhex(digits), dtype=torch_dtype(dtype)) if digits else torch.empty(0)
            tensors[name] = flat.to(torch_dtype(dtype)).reshape(shape)
        self._held = MemoryTensors(tensors)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        self._held.fill(spec, start, out)

    def close(self) -> None:
        super().close()
        self._held.close()


def save_hex(tensors: Mapping[str, Tensor], path: Path) -> None:
    rows = {n: [str(t.dtype).split(".")[1], list(t.shape), bytes(raw_bytes(t)).hex()] for n, t in tensors.items()}
    path.write_text(json.dumps(rows))


HEX = Format(
    claims=lambda source: any(name.endswith(".hex") for name in source.weights),
    open=lambda source: stored_model(HexTensors(source, next(n for n in source.weights if n.endswith(".hex")))),
)


@pytest.fixture
def with_hex(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, "actmat.formats", "hex", HEX)


@pytest.mark.usefixtures("with_hex")
class TestHexFormat(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        save_hex(tensors, folder / "weights.hex")
        return open_tensors(folder)


@pytest.mark.usefixtures("with_hex")
def test_a_new_format_is_also_read_from_a_file_and_from_the_hub(hub: HubStandIn, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    save_hex({"w": torch.arange(3.0)}, folder / "weights.hex")
    (folder / "config.json").write_text('{"model_type": "toy"}')
    hub.add("org/toy", folder)
    for location in (folder, folder / "weights.hex", "hf://org/toy"):
        with open_model(location) as checkpoint:
            assert torch.equal(checkpoint.tensors.read("w"), torch.arange(3.0))
            assert checkpoint.config == (None if location == folder / "weights.hex" else {"model_type": "toy"})


def test_refusals_list_the_formats_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.hex").write_text("{}")
    with pytest.raises(CheckpointError) as before:
        open_tensors(tmp_path)
    listed = "modules, safetensors, torch, dcp, gguf, pipelines"
    assert f"expected weights in one of the formats {listed}, found weights.hex" in str(before.value)
    with pytest.raises(CheckpointError) as single:
        open_tensors(tmp_path / "weights.hex")
    assert f"expected weights in one of the formats {listed}, found weights.hex" in str(single.value)
    plug(monkeypatch, "actmat.formats", "hex", HEX)
    (tmp_path / "weights.hex").rename(tmp_path / "weights.txt")
    with pytest.raises(CheckpointError) as after:
        open_tensors(tmp_path)
    assert f"{listed}, hex, found weights.txt" in str(after.value)


def test_the_first_format_that_claims_a_folder_opens_it(tmp_path: Path, with_hex: None) -> None:
    save_hex({"old": torch.ones(1)}, tmp_path / "weights.hex")
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(open_tensors(tmp_path).specs) == {"w"}


def read_sum(handle: TensorsHandle) -> tuple[int, str, float]:
    with open_handle(handle) as checkpoint:
        return os.getpid(), checkpoint.location, float(checkpoint.read("w").sum())


def test_another_process_opens_handles_of_relative_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sharded").mkdir()
    save_sharded({"w": torch.arange(5.0), "v": torch.ones(2)}, Path("sharded"), shards=2)
    torch.save({"w": torch.ones(7)}, "weights.pt")
    locations = ("sharded", "sharded/model.safetensors.index.json", "./weights.pt")
    handles = [open_tensors(location).handle() for location in locations]
    monkeypatch.chdir("/")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(read_sum, handles)
    assert [(location, total) for _, location, total in found] == list(zip(locations, (10.0, 10.0, 7.0), strict=True))
    assert os.getpid() not in {process for process, _, _ in found}


def test_a_handle_of_files_that_are_gone_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    handle = open_tensors(tmp_path / "model.safetensors").handle()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="found nothing there"):
        open_handle(handle)
