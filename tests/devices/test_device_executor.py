"""Workers of devices, on simulated ones, through the conformance suite and beyond it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.devices import executor_of, large, opened, plain
from tests.helpers.executor_suite import ExecutorConformance
from tests.helpers.merging import Family, actmat, contents
from tests.helpers.samples import Samples

import actmat as library
from actmat.engine.executors.base import Executor
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import SinkSource
from actmat.engine.reader import TensorReader
from actmat.engine.resources import Resources
from actmat.engine.session import Session
from actmat.engine.units import Unit
from actmat.errors import CheckpointError, MergeError
from actmat.planning.regions import Region


class TestOneDevice(ExecutorConformance):
    workers = 2  # of the device and of the host
    device = "cpu:0"

    def make(self, inputs: Inputs, writers: Sequence[SinkSource], resources: Resources) -> Executor:
        return ThreadExecutor(inputs, writers, Resources(1, resources.memory, self.device))


class TestTwoDevices(TestOneDevice):
    workers = 3
    device = "cpu:0,1"


@pytest.mark.parametrize("method", ["actmat", "ties", "dare", "model_stock", "karcher"])
def test_large_tensors_have_the_bytes_of_the_host(tmp_path: Path, method: str) -> None:
    samples, fields = large(tmp_path), {"method": method, "scope": "all"}
    with opened(samples, "expected", fields) as expected:
        expected.merge_here()
    with opened(samples, "out", fields) as found:
        executor = executor_of(found)
        found.survey(executor)
        found.take(executor.run(found.spec, found.units))
        assert all(unit.device_bytes for unit in found.units)
        assert plain(found) == plain(expected)


def test_a_device_holds_deltas_and_the_host_one_chunk_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas are formed chunk by chunk on the host: never in the memory that is to be the device's."""
    sizes: list[tuple[bool, int]] = []
    read: Callable[..., bool] = TensorReader.read_chunk

    def watched(self: TensorReader, t: int, start: int, base_raw: torch.Tensor, out: torch.Tensor) -> bool:
        sizes.append((self.on_host, out.untyped_storage().nbytes()))
        return read(self, t, start, base_raw, out)

    monkeypatch.setattr(TensorReader, "read_chunk", watched)
    with opened(large(tmp_path), "out", {"method": "ties"}) as run:
        run.take(executor_of(run).run(run.spec, run.units))
    assert {on_host for on_host, _ in sizes} == {False}
    assert max(nbytes for _, nbytes in sizes) == 4 << 19


def test_running_out_of_memory_names_tensor_plan_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: TensorReader, region: Region) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    monkeypatch.setattr(TensorReader, "passing_buffer", full)
    with opened(large(tmp_path), "out", {"method": "ties"}) as run, pytest.raises(MergeError) as caught:
        next(executor_of(run).run(run.spec, run.units))
    message = str(caught.value)
    assert "cpu:0 ran out of memory at tensor 'model.layers.0.mlp.up_proj.weight'" in message
    assert "31.1 MB were planned" in message
    assert "--device-memory below 31.1 MB" in message
    assert "Tried to allocate 20 MiB" in message
    assert not caught.value.recurs, "what is finished is kept: memory may be free tomorrow"


def test_a_merge_that_ran_out_of_memory_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family.make(tmp_path, layers=2)
    library.merge(family.base, family.experts, out=family.out, durable=False)
    expected = contents(family.out)["model.safetensors"]
    base_of, merged = TensorReader.base_of, threading.Event()

    def fails(self: TensorReader, region: Region) -> Any:
        if self.item.name == "lm_head.weight":  # it may be the first on the device; the host merges others
            assert merged.wait(60)
            raise torch.OutOfMemoryError("CUDA out of memory")
        merged.set()
        return base_of(self, region)

    out = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(TensorReader, "base_of", fails)
        with pytest.raises(MergeError, match=r"cpu:0 ran out of memory at tensor 'lm_head\.weight'"):
            library.merge(family.base, family.experts, out=out, durable=False, device="cpu:0")
    report = library.merge(family.base, family.experts, out=out, durable=False, device="cpu:0")
    assert contents(out)["model.safetensors"] == expected
    assert report.resumed > 0


def test_other_errors_of_a_device_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Session, unit: Unit) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Session, "merge", breaks)
    with (
        opened(large(tmp_path, 30, 20), "out", {"method": "ties"}) as run,
        pytest.raises(RuntimeError, match="illegal memory access"),
    ):
        next(executor_of(run).run(run.spec, run.units))


def test_a_file_that_fails_ends_the_run(tmp_path: Path) -> None:
    samples = large(tmp_path, 300, 200)
    with opened(samples, "out", {"method": "ties"}) as run:
        expert = samples.experts[1] / "model.safetensors"
        with expert.open("r+b") as file:
            file.truncate(expert.stat().st_size - 10_000)
        with pytest.raises(CheckpointError):
            run.take(executor_of(run).run(run.spec, run.units))
    assert not [t for t in threading.enumerate() if t.name.startswith("actmat")], "a worker was left"


@pytest.mark.parametrize("fit", [1, 2])
def test_the_plan_says_who_merges_what_and_units_share_a_device_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit: int
) -> None:
    """Units of devices count in the host's memory, too."""
    lock, merge = threading.Lock(), Session.merge
    where: dict[str, str] = {}
    held, most = Counter[str](), Counter[str]()

    def watched(self: Session, unit: Unit) -> Any:
        name = "" if self.device is None else self.device.name
        taken = Counter({"host": unit.host_bytes, name: unit.device_bytes} if name else {"host": unit.host_bytes})
        with lock:
            held.update(taken)
            for place, size in held.items():
                most[place] = max(most[place], size)
            where[unit.name] = name
        try:
            time.sleep(0.02)  # so that others begin, if they are let in
            return merge(self, unit)
        finally:
            with lock:
                held.subtract(taken)

    with opened(Samples.checkpoints(tmp_path), "out", {"method": "actmat", "scope": "all"}) as run:
        host, there = (max(getattr(u, n) for u in run.units) for n in ("host_bytes", "device_bytes"))
        monkeypatch.setattr(Session, "merge", watched)
        executor = executor_of(run, "cpu:0,1", threads=4, memory=8 * host, device_memory=fit * there)
        run.take(executor.run(run.spec, run.units))
        moved = {u.name for u in run.units if u.device_bytes}
    assert {name for name, device in where.items() if device} == moved
    assert "model.norm.weight" not in moved
    assert len(moved) >= 8
    assert most["host"] <= 8 * host
    assert max(most["cpu:0"], most["cpu:1"]) <= fit * there
    assert (max(most["cpu:0"], most["cpu:1"]) > there) == (fit > 1), "two units on one device, if both fit"


def test_files_are_finished_one_after_another_where_they_are_sent(tmp_path: Path) -> None:
    with opened(large(tmp_path, 300, 200, layers=4), "out", {"method": "actmat"}) as run:
        executor = ThreadExecutor(run.inputs, run.writers, Resources(1, 1 << 33, "cpu:0", in_order=True))
        assert [result.unit for result in executor.run(run.spec, list(run.units))] == list(run.units)


@pytest.mark.parametrize("names", ["cpu:0", "cpu:0,1,2"])
def test_a_merge_on_devices_writes_the_bytes_of_one_on_the_host(tmp_path: Path, names: str) -> None:
    family = Family.make(tmp_path, layers=1)
    weights: list[bytes] = []
    ties, memory = ("--method", "ties", "--option", "trim=global"), ("--device-memory", "64MB")
    for flags in ((), ("--device", names, *memory)):
        outcome = actmat(family.argv(*ties, "--overwrite", *flags))
        assert outcome.code == 0, outcome.err
        weights.append(contents(family.out)["model.safetensors"])
    assert weights[0] == weights[1]
    manifest = json.loads((family.out / "actmat_manifest.json").read_text())
    assert manifest["device"] == names
    again = actmat(family.argv(*ties, "--device", "cpu:5", *memory))
    assert again.code == 0, "the number of devices does not matter to what is finished"


def test_a_diagnosis_on_devices_measures_the_same(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    here, there = (library.diagnose(family.base, family.experts, device=device) for device in ("cpu", "cpu:0,1"))
    assert here.measures == there.measures
    assert here.measures
