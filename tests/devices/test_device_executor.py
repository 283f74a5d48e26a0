"""The executor of devices, on simulated ones of bounded memory, through the shipped conformance suite and beyond it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.devices import executor_of, large, opened, plain
from tests.helpers.merging import Family, actmat, contents

import actmat as library
from actmat.engine.devices.device import SimulatedDevice
from actmat.engine.executors import lockstep
from actmat.engine.executors.base import Executor
from actmat.engine.executors.batches import batches_of
from actmat.engine.executors.devices import DeviceExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import SinkSource
from actmat.engine.resources import Resources
from actmat.engine.session import Session
from actmat.engine.units import Unit
from actmat.errors import CheckpointError, MergeError
from actmat.extras.conformance.executors import ExecutorConformance, _Run
from actmat.extras.conformance.samples import Samples


class TestOneDevice(ExecutorConformance):
    devices: ClassVar[int] = 1
    workers = 2
    device = "cpu:0"

    def make(self, inputs: Inputs, writers: Sequence[SinkSource], resources: Resources) -> Executor:
        devices = [SimulatedDevice(f"cpu:{n}", 64 << 20) for n in range(self.devices)]
        return DeviceExecutor(inputs, writers, Resources(1, resources.memory, self.device), devices)


class TestTwoDevices(TestOneDevice):
    devices = 2
    device = "cpu:0,1"


class TestThreeDevices(TestOneDevice):
    devices = 3
    device = "cpu:0,1,2"


# Tensors larger than the chunks of the host


@pytest.mark.parametrize("method", ["actmat", "ties", "dare", "model_stock", "karcher"])
def test_large_tensors_have_the_bytes_of_the_host_within_the_planned_memory(tmp_path: Path, method: str) -> None:
    samples, fields = large(tmp_path), {"method": method, "scope": "all"}
    with opened(samples, "expected", fields) as expected:
        expected.merge_here()
    with opened(samples, "out", fields) as found:
        device = SimulatedDevice("cpu:0", 256 << 20)
        executor = executor_of(found, device)
        found.survey(executor)
        found.take(executor.run(found.spec, found.units))
        planned = max(unit.device_bytes for unit in found.units)
        assert planned
        assert plain(found) == plain(expected)
    peak = device.ledger.peak - device.staging_bytes
    assert planned / 4 < peak <= planned, "the plan's estimate bounds what the device allocates"


def test_nothing_waits_for_a_collection_of_garbage(tmp_path: Path) -> None:
    """Deltas of one tensor are gone before those of the next come: a device has no memory for both."""
    samples = large(tmp_path, 300, 200, layers=6)
    peaks = {}
    gc.disable()
    try:
        for layers in (1, 6):
            with opened(samples, f"out{layers}", {"method": "ties"}) as run:
                device = SimulatedDevice("cpu:0", 64 << 20)
                run.take(executor_of(run, device).run(run.spec, run.units[:layers]))
                peaks[layers] = device.ledger.peak
    finally:
        gc.enable()
    assert 0 <= peaks[6] - peaks[1] < 1000, "single numbers at most"


# Order


def test_files_are_finished_one_after_another_where_they_are_sent(tmp_path: Path) -> None:
    """A batch holds tensors of one file; otherwise it would take those of the last file with those of the first."""
    samples = large(tmp_path, 300, 200, layers=6)
    with opened(samples, "out", {"method": "actmat", "max_shard_size": "250kB"}) as run:
        (plan,) = run.spec.plans
        file = {name: n for n, shard in enumerate(plan.shards) for name in shard.extents}
        assert [len(shard.extents) for shard in plan.shards] == [2, 2, 2]

        def sizes(in_order: bool) -> list[int]:
            return [len(b) for b in batches_of(run.units, [plan], 1, 1 << 30, in_order=in_order)]

        assert sizes(in_order=False) == [6]
        assert sizes(in_order=True) == [2, 2, 2]
        executor = executor_of(run, SimulatedDevice("cpu:0", 256 << 20))
        executor._resources = replace(executor._resources, in_order=True)
        run.survey(executor)
        found = [file[result.unit.name] for result in executor.run(run.spec, list(run.units))]
        assert found == [0, 0, 1, 1, 2, 2]


# Memory


def test_a_tensor_beyond_the_memory_of_every_device_is_refused_before_the_work(tmp_path: Path) -> None:
    with opened(large(tmp_path, 300, 200), "out", {"method": "ties"}) as run:
        devices = [SimulatedDevice(f"cpu:{n}", (13 + n) * 10**6) for n in range(2)]
        with pytest.raises(MergeError) as caught:
            next(executor_of(run, *devices).run(run.spec, run.units))
    message = str(caught.value)
    assert "too little free memory for 2 tensor(s). Free for one tensor: cpu:0 2.51 MB, cpu:1 3.51 MB." in message
    for layer in range(2):
        assert f"tensor 'model.layers.{layer}.mlp.up_proj.weight' needs 7.67 MB" in message
    assert "--device-memory" in message
    assert not caught.value.recurs, "what is finished is kept: memory may be free tomorrow"


def test_a_large_tensor_goes_to_the_device_that_has_room(tmp_path: Path) -> None:
    with opened(large(tmp_path, 300, 200, layers=4), "out", {"method": "ties"}) as run:
        small, roomy = SimulatedDevice("cpu:0", 12 * 10**6), SimulatedDevice("cpu:1", 64 << 20)
        run.take(executor_of(run, small, roomy).run(run.spec, run.units))
        assert len(run.records) == 4
    assert small.ledger.peak <= small.staging_bytes, "nothing was merged there"


def test_running_out_of_memory_names_tensor_plan_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes memory after the check."""
    monkeypatch.setattr(SimulatedDevice, "free_bytes", lambda self: 10**9)
    with opened(large(tmp_path, 300, 200), "out", {"method": "ties"}) as run:
        device = SimulatedDevice("cpu:0", 12 * 10**6)
        with pytest.raises(MergeError) as caught:
            next(executor_of(run, device).run(run.spec, run.units))
    message = str(caught.value)
    assert "cpu:0 ran out of memory at tensor 'model.layers.0.mlp.up_proj.weight'" in message
    assert "7.67 MB were planned" in message
    assert "--device-memory below 7.67 MB" in message
    assert "cpu:0 is out of memory: tried to allocate" in message
    assert not caught.value.recurs


def test_other_errors_of_a_device_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Session, unit: Unit) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Session, "merge", breaks)
    with (
        opened(large(tmp_path, 30, 20), "out", {"method": "ties"}) as run,
        pytest.raises(RuntimeError, match="illegal memory access"),
    ):
        next(executor_of(run, SimulatedDevice("cpu:0")).run(run.spec, run.units))


def test_host_memory_bounds_units_of_devices_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most, lock, merge = [0], [0], threading.Lock(), Session.merge

    def watched(self: Session, unit: Unit) -> Any:
        with lock:
            alive[0] += unit.host_bytes
            most[0] = max(most[0], alive[0])
        try:
            return merge(self, unit)
        finally:
            with lock:
                alive[0] -= unit.host_bytes

    monkeypatch.setattr(Session, "merge", watched)
    with opened(large(tmp_path, 760, 40, layers=6), "out", {"method": "ties"}) as run:
        largest = max(u.host_bytes for u in run.units)
        devices = [SimulatedDevice(f"cpu:{n}") for n in range(3)]
        resources = Resources(2, largest, "cpu:0,1,2")
        run.take(DeviceExecutor(run.inputs, run.writers, resources, devices).run(run.spec, run.units))
    assert most[0] == largest


# Who does what


def workers_of(run: _Run, executor: DeviceExecutor, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Devices (by their staging; 0: the host) that merged a unit, and the threads that used each at the same time."""
    found: dict[str, set[int]] = {}
    merge: Callable[..., Any] = Session.merge

    def watched(self: Session, unit: Unit) -> Any:
        found.setdefault(unit.name, set()).add(id(self._staging) if self._staging else 0)
        return merge(self, unit)

    monkeypatch.setattr(Session, "merge", watched)
    run.take(executor.run(run.spec, run.units))
    return found


def test_the_plan_says_who_merges_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples.checkpoints(tmp_path)
    with opened(samples, "out", {"method": "actmat", "scope": "all"}) as run:
        found = workers_of(run, executor_of(run, SimulatedDevice("cpu:0"), threads=3), monkeypatch)
        moved = {u.name for u in run.units if u.device_bytes}
        assert {name for name, where in found.items() if where != {0}} == moved
        assert "model.norm.weight" not in moved
        assert len(moved) >= 8


def test_small_matrices_of_one_shape_are_merged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[lockstep.Lockstep] = []

    def make(running: int, original: type[lockstep.Lockstep] = lockstep.Lockstep) -> lockstep.Lockstep:
        steps.append(original(running))
        return steps[-1]

    monkeypatch.setattr(lockstep, "Lockstep", make)
    with opened(Samples.checkpoints(tmp_path), "out", {"method": "tsv"}) as run:
        run.take(executor_of(run, SimulatedDevice("cpu:0")).run(run.spec, run.units))
        assert len(run.records) == len(run.units)
    assert max(size for step in steps for size in step.sizes) == 4, "q and k of two layers"


def test_one_thread_at_a_time_uses_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    using: dict[str, int] = {}
    most: dict[str, int] = {}
    original = SimulatedDevice.empty

    def watched(self: SimulatedDevice, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if "reader" in threading.current_thread().name:
            return original(self, numel, dtype)
        using[self.name] = using.get(self.name, 0) + 1
        most[self.name] = max(most.get(self.name, 0), using[self.name])
        try:
            return original(self, numel, dtype)
        finally:
            using[self.name] -= 1

    monkeypatch.setattr(SimulatedDevice, "empty", watched)
    with opened(Samples.checkpoints(tmp_path), "out", {"method": "tsv"}) as run:
        devices = [SimulatedDevice(f"cpu:{n}") for n in range(2)]
        run.take(executor_of(run, *devices, threads=16).run(run.spec, run.units))
    assert most == {"cpu:0": 1, "cpu:1": 1}


def test_the_bytes_of_the_next_tensor_are_read_while_one_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch: Callable[..., None] = Session.prefetch
    merge: Callable[..., Any] = Session.merge
    seen: list[str] = []

    def announced(self: Session, unit: Unit) -> None:
        seen.append(f"announced {unit.name[13]}")
        prefetch(self, unit)

    def watched(self: Session, unit: Unit) -> Any:
        seen.append(f"merged {unit.name[13]}")
        return merge(self, unit)

    monkeypatch.setattr(Session, "prefetch", announced)
    monkeypatch.setattr(Session, "merge", watched)
    with opened(large(tmp_path, 760, 740, layers=3), "out", {"method": "ties"}) as run:
        run.take(executor_of(run, SimulatedDevice("cpu:0")).run(run.spec, run.units))
    order = [word.split()[0] for word in seen]
    assert order == ["announced", "announced", "merged", "announced", "merged", "merged"]


def test_a_file_that_fails_while_it_is_read_ahead_fails_the_run(tmp_path: Path) -> None:
    samples = large(tmp_path, 300, 200)
    with opened(samples, "out", {"method": "ties"}) as run:
        expert = samples.experts[1] / "model.safetensors"
        with expert.open("r+b") as file:
            file.truncate(expert.stat().st_size - 10_000)
        with pytest.raises(CheckpointError):
            run.take(executor_of(run, SimulatedDevice("cpu:0")).run(run.spec, run.units))
    assert not [t for t in threading.enumerate() if t.name.startswith("actmat")], "a worker was left"


# From the command line


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


def test_a_merge_that_ran_out_of_memory_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family.make(tmp_path, layers=2)
    library.merge(family.base, family.experts, out=family.out, durable=False)
    expected = contents(family.out)["model.safetensors"]
    merge: Callable[..., Any] = Session.merge
    merged = threading.Event()

    def fails(self: Session, unit: Unit) -> Any:
        if unit.name == "lm_head.weight":  # it may be the first on the device; the host merges others meanwhile
            assert merged.wait(60)
            raise torch.OutOfMemoryError("CUDA out of memory")
        result = merge(self, unit)
        merged.set()
        return result

    out = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(Session, "merge", fails)
        with pytest.raises(MergeError, match=r"cpu:0 ran out of memory at tensor 'lm_head\.weight'"):
            library.merge(family.base, family.experts, out=out, durable=False, device="cpu:0")
    report = library.merge(family.base, family.experts, out=out, durable=False, device="cpu:0")
    assert contents(out)["model.safetensors"] == expected
    assert report.resumed > 0


def test_a_diagnosis_on_devices_measures_the_same(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    here, there = (library.diagnose(family.base, family.experts, device=device) for device in ("cpu", "cpu:0,1"))
    assert here.measures == there.measures
    assert here.measures


def test_an_executor_that_does_not_fit_the_device_is_refused(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    with pytest.raises(MergeError, match="several threads would share a device"):
        library.merge(family.base, family.experts, out=family.out, device="cpu:0", executor="threads")
    with pytest.raises(MergeError, match="needs devices"):
        library.merge(family.base, family.experts, out=family.out, executor="devices")
    assert not family.out.exists()
