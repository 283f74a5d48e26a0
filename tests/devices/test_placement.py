"""What a plan places on devices, and that what they merge has the bytes of the host."""

import contextlib
import dataclasses
import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.devices.on_device import OneDevice
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.merging import EMBEDDING, NORM, Q0, UP0, Family, actmat, contents
from tests.helpers.samples import Samples
from tests.helpers.sessions import OpenedRun, opened_run

import actmat as library
from actmat.checkpoints.base import TensorSpec
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.reader import ItemReader
from actmat.engine.resources import Resources
from actmat.engine.session import Session
from actmat.engine.units import Unit, plan_units
from actmat.errors import CheckpointError, MergeError
from actmat.experts.deltas import DeltaSource
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.planning import MergePlan
from actmat.planning.item import Item, ItemCost, MethodCall, Reading, Target, Write
from actmat.planning.regions import Region
from actmat.planning.statistics import ExpertStatistics
from actmat.planning.work import HOST, DeviceRoom, place
from actmat.recipe import make_recipe

# Places of items in a plan: device or host, why, and the memory of each.


def placed(
    method: str, shape: tuple[int, ...], room: DeviceRoom, *, factored: bool = False
) -> tuple[Reading, ItemCost, str]:
    """Place of a tensor of three bfloat16 experts that a method merges in float32."""
    declared = get_method(method)
    source = DeltaSource("w", "stored", "bfloat16", 2 * math.prod(shape), rank=4 * factored)
    target = Target(TensorSpec("w", shape, "bfloat16", ""), TensorLayout(Role.LINEAR, ""), sources=(source,) * 3)
    call = MethodCall(method, declared.resolve_options({}))
    reading = Reading("factors") if factored else None
    recipe = make_recipe({"base": "b", "experts": ["a", "b", "c"]})
    return place(Item(target, "merge", "", Write("sum"), call, reading), recipe, room)


def test_without_devices_nothing_is_said() -> None:
    _, cost, words = placed("actmat", (600, 500), HOST)
    assert (cost.device_bytes, words) == (0, "")


@pytest.mark.parametrize(
    ("method", "room", "factored", "words"),
    [
        ("actmat", DeviceRoom("cuda:0,1"), False, ", on cuda"),
        ("average", DeviceRoom("cuda"), False, ", on the host: elementwise"),
        ("actmat", DeviceRoom("cuda"), True, ", on the host: factors are small"),
    ],
)
def test_every_place_has_a_reason(method: str, room: DeviceRoom, factored: bool, words: str) -> None:
    _, cost, reason = placed(method, (600, 500), room, factored=factored)
    assert reason == words
    assert (cost.device_bytes > 0) == (", on the host" not in words)


def test_what_is_too_large_stays_on_the_host_and_says_how_much_too_large() -> None:
    need = placed("actmat", (600, 500), DeviceRoom("cuda"))[1].device_bytes
    assert placed("actmat", (600, 500), DeviceRoom("cuda", need))[1].device_bytes == need
    *place, words = placed("actmat", (600, 500), DeviceRoom("cuda", need - 1))
    assert words == f", on the host: it needs {need / 1e6:.3g} MB of a device, which has {need / 1e6:.3g} MB"
    assert place == list(placed("actmat", (600, 500), HOST)[:2])


def test_memory_is_estimated_apart() -> None:
    """A large matrix on the device costs the host its base as stored, one delta at most, and chunks."""
    rows, columns, room = 8192, 4096, DeviceRoom("cuda")
    entries = rows * columns
    _, cost, _ = placed("actmat", (rows, columns), room)
    deltas, base = 4 * entries, 2 * entries
    workspace = 4 * get_method("actmat").cost.workspace((rows, columns), 3, get_method("actmat").resolve_options({}))
    assert cost.device_bytes >= base + deltas + workspace
    assert cost.device_bytes < 1.6 * (base + deltas + workspace)
    assert base < cost.host_bytes <= base + deltas + 64 * 2**19
    _, held, _ = placed("ties", (rows, columns), room)
    assert held.device_bytes >= base + 3 * deltas, "a method that streams on the host holds its deltas on a device"


def plan_of(family: Family, **fields: Any) -> MergePlan:
    return library.plan(family.base, family.experts, **fields)


def test_a_plan_for_devices(family: Family) -> None:
    plan = plan_of(family, device="cuda:0,1", device_memory="40GB")
    assert plan.device == "cuda:0,1"
    assert plan.device_memory == 40 * 10**9
    assert {i.name for i in plan.on_device} >= {Q0, UP0}
    assert not {EMBEDDING, NORM} & {i.name for i in plan.on_device}


def test_the_number_of_devices_does_not_change_the_result_but_their_kind_does(family: Family) -> None:
    one, two, all_, host = (plan_of(family, device=d).fingerprint() for d in ("cuda:1", "cuda:0,1", "cuda", "cpu"))
    assert one == two == all_ != host
    assert plan_of(family, device="cuda", device_memory="40MB").fingerprint() == all_
    assert plan_of(family, device="cuda", device_memory=1_000).fingerprint() != all_, "other tensors are moved"


def test_the_screen_shows_where_and_why(family: Family) -> None:
    flags = ("-m", "actmat", "--device", "cuda:0,2", "--set", "device_memory=24GB")
    said = actmat(family.argv(*flags, command="plan"), code=0).words
    assert "devices: cuda:0,2: 4 of 7 tensors" in said
    assert "needs the most, 4.2 MB; limit per tensor 24 GB" in said
    assert "1-D norm: mean of the deltas, on the host: elementwise" in said
    assert "name ends in q_proj: actmat, on cuda" in said
    assert "devices" not in actmat(family.argv(command="plan")).out


def test_problems_with_devices_come_with_all_others(family: Family) -> None:
    outcome = actmat(family.argv("--device", "cuda:0,0", "--method", "tie", command="plan"), code=1)
    assert "0 is given 2 times" in outcome.err
    assert "Did you mean 'ties'?" in outcome.err
    outcome = actmat(family.argv("--set", "device_memory=1GB", "--method", "tie", command="plan"))
    assert "none is given: add --device" in outcome.err
    assert "Did you mean 'ties'?" in outcome.err


def test_adapters_stay_on_the_host(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_adapter(tmp_path / f"a{seed}", "llama", seed, **LLAMA)
    adapters = [tmp_path / "a1", tmp_path / "a2"]
    plan = library.plan(None, adapters, device="cuda")
    assert not plan.on_device
    assert "adapters are merged on the host, not on a device: their factors are small" in map(str, plan.notes)
    tiny("llama").save_pretrained(tmp_path / "base")
    into_model = library.plan(tmp_path / "base", adapters, device="cuda", method="dc_merge")
    assert any(i.reason.endswith("in factored form, on the host: factors are small") for i in into_model.items)
    dense = library.plan(tmp_path / "base", adapters, device="cuda", method="ties")
    assert dense.on_device, "deltas that are formed are merged where the method computes"


def test_variants_are_placed_together(family: Family) -> None:
    """Elementwise variants go along; if one is too large for a device, all stay on the host."""
    actmat_, average, ties = (plan_of(family, device="cuda", method=m) for m in ("actmat", "average", "ties"))

    def bytes_of(*plans: MergePlan) -> int:
        units = plan_units(plans, [()] * len(plans), observed=False)
        return next(u.device_bytes for u in units if u.name == Q0)

    assert bytes_of(average) == 0
    assert bytes_of(actmat_) == actmat_.by_name[Q0].cost.device_bytes
    assert bytes_of(actmat_, average) > bytes_of(actmat_), "deltas are held for both"
    assert bytes_of(actmat_, ties) > max(bytes_of(actmat_), bytes_of(ties))
    on_host = plan_of(family, device="cuda", method="tsv", device_memory=1_000)
    assert not on_host.on_device
    assert bytes_of(actmat_, on_host) == 0


def test_variants_that_do_not_fit_together_are_merged_on_the_host_in_memory_that_is_counted(family: Family) -> None:
    need = plan_of(family, device="cuda", method="ties").by_name[UP0].cost.device_bytes
    plans = [plan_of(family, device="cuda", method="ties", scale=s, device_memory=need) for s in (0.5, 1.0)]
    moved = [u for u in plan_units(plans, [()] * 2, observed=False) if u.name == UP0]
    assert plans[0].by_name[UP0].cost.device_bytes == need
    assert moved[0].device_bytes == 0
    assert moved[0].host_bytes > need


# Workers of devices, on simulated ones, through the conformance suite and beyond it.


def large(folder: Path, rows: int = 760, columns: int = 740, layers: int = 2) -> Samples:
    """A base and three experts in bfloat16; a method that streams on the host holds its deltas on a device."""
    rng = torch.Generator().manual_seed(0)
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(layers)]
    base = {n: torch.randn(rows, columns, generator=rng).bfloat16() for n in names}
    experts = [
        {n: (x.float() + 0.02 * torch.randn(x.shape, generator=rng)).bfloat16() for n, x in base.items()}
        for _ in range(3)
    ]
    first, *rest = (save_folder(folder / str(t), m, {"model_type": "llama"}) for t, m in enumerate((base, *experts)))
    return Samples(folder, first, tuple(rest))


def executor_of(
    run: OpenedRun,
    device: str = "cpu:0",
    *,
    threads: int = 1,
    memory: int = 1 << 33,
    device_memory: float = math.inf,
) -> ThreadExecutor:
    return ThreadExecutor(run.inputs, run.writers, Resources(threads, memory, device, device_memory))


def opened(samples: Samples, name: str, *variants: dict[str, Any]) -> contextlib.AbstractContextManager[OpenedRun]:
    folders = [samples.folder / name / str(p) for p in range(len(variants))]
    return opened_run([samples.recipe() | fields for fields in variants], folders, None, DeviceRoom("cpu:0"))


def plain(run: OpenedRun) -> Any:
    records = {key: dataclasses.replace(record, seconds=0.0) for key, record in run.records.items()}
    return run.files(), records, run.findings.problems()


class TestOneDevice(OneDevice): ...


class TestTwoDevices(OneDevice):
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
    read: Callable[..., bool] = ItemReader.read_chunk

    def watched(self: ItemReader, t: int, start: int, base_raw: torch.Tensor, out: torch.Tensor) -> bool:
        sizes.append((self.on_host, out.untyped_storage().nbytes()))
        return read(self, t, start, base_raw, out)

    monkeypatch.setattr(ItemReader, "read_chunk", watched)
    with opened(large(tmp_path), "out", {"method": "ties"}) as run:
        run.take(executor_of(run).run(run.spec, run.units))
    assert {on_host for on_host, _ in sizes} == {False}
    assert max(nbytes for _, nbytes in sizes) == 4 << 19


def test_running_out_of_memory_names_tensor_plan_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: ItemReader, region: Region) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    monkeypatch.setattr(ItemReader, "passing_buffer", full)
    with opened(large(tmp_path), "out", {"method": "ties"}) as run, pytest.raises(MergeError) as caught:
        next(executor_of(run).run(run.spec, run.units))
    message = str(caught.value)
    assert "cpu:0 ran out of memory at tensor 'model.layers.0.mlp.up_proj.weight'" in message
    assert "31.1 MB were planned" in message
    assert "--set device_memory=SIZE below 31.1 MB" in message
    assert "Tried to allocate 20 MiB" in message
    assert not caught.value.is_permanent, "what is finished is kept: memory may be free tomorrow"


def test_a_merge_that_ran_out_of_memory_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family.make(tmp_path, layers=2)
    library.merge(family.base, family.experts, out=family.out, durable=False)
    expected = contents(family.out)["model.safetensors"]
    base_of, merged = ItemReader.base_of, threading.Event()

    def fails(self: ItemReader, region: Region) -> Any:
        if self.item.name == "lm_head.weight":  # it may be the first on the device; the host merges others
            assert merged.wait(60)
            raise torch.OutOfMemoryError("CUDA out of memory")
        merged.set()
        return base_of(self, region)

    out = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(ItemReader, "base_of", fails)
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
    held, most, shared = Counter[str](), Counter[str](), threading.Event()

    def watched(self: Session, unit: Unit) -> Any:
        name = "" if self.device is None else self.device.name
        taken = Counter({"host": unit.host_bytes, name: unit.device_bytes} if name else {"host": unit.host_bytes})
        with lock:
            held.update(taken)
            for place, size in held.items():
                most[place] = max(most[place], size)
            if max(held["cpu:0"], held["cpu:1"]) > there:
                shared.set()
            where[unit.name] = name
        try:
            shared.wait(60 if name and fit == 2 else 0.02)  # so that others begin, if they are let in
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


def test_one_thread_loads_linear_algebra_before_others_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls on a GPU, made by two threads at once, raised "lazy wrapper should be called at most once"."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.linalg, "cholesky", seen.append)
    for device, calls in (("cpu", 0), ("cpu:0,1", 1)):
        ThreadExecutor(Inputs((), None, (), ExpertStatistics.none(())), (), Resources(2, 1 << 30, device))
        assert len(seen) == calls, "in the thread that makes the executor, once for all devices"


@pytest.mark.parametrize("names", ["cpu:0", "cpu:0,1,2"])
def test_a_merge_on_devices_writes_the_bytes_of_one_on_the_host(tmp_path: Path, names: str) -> None:
    family = Family.make(tmp_path, layers=1)
    weights: list[bytes] = []
    ties, memory = ("--method", "ties", "--option", "trim=global"), ("--set", "device_memory=64MB")
    for flags in ((), ("--device", names, *memory)):
        actmat(family.argv(*ties, "--overwrite", *flags), code=0)
        weights.append(contents(family.out)["model.safetensors"])
    assert weights[0] == weights[1]
    manifest = json.loads((family.out / "actmat_manifest.json").read_text())
    assert manifest["device"] == names
    actmat(family.argv(*ties, "--device", "cpu:5", *memory), code=0)


def test_a_diagnosis_on_devices_measures_the_same(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    here, there = (library.diagnose(family.base, family.experts, device=device) for device in ("cpu", "cpu:0,1"))
    assert here.measures == there.measures
    assert here.measures
