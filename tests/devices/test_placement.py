"""Places of items in a plan: device or host, why, and the memory of each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.devices import placed
from tests.helpers.merging import EMBEDDING, NORM, Q0, UP0, Family, actmat
from tests.helpers.samples import Samples

import actmat as library
from actmat.engine.units import plan_units
from actmat.methods import get_method
from actmat.planning import MergePlan
from actmat.planning.placement import HOST, DeviceRoom


def test_without_devices_nothing_is_said() -> None:
    found = placed("actmat", (600, 500), HOST)
    assert (found.device_bytes, found.words) == (0, "")


@pytest.mark.parametrize(
    ("method", "room", "form", "words"),
    [
        ("actmat", DeviceRoom("cuda:0,1"), "dense", ", on cuda"),
        ("ties", DeviceRoom("mps"), "dense", ", on mps"),
        ("actmat", DeviceRoom("mps"), "dense", ", on the host: mps has no float64, in which spectra are computed"),
        ("average", DeviceRoom("cuda"), "dense", ", on the host: elementwise"),
        ("actmat", DeviceRoom("cuda"), "factored", ", on the host: factors are small"),
    ],
)
def test_every_place_has_a_reason(method: str, room: DeviceRoom, form: Any, words: str) -> None:
    found = placed(method, (600, 500), room, form)
    assert found.words == words
    assert (found.device_bytes > 0) == (", on the host" not in words)


def test_what_is_too_large_stays_on_the_host_and_says_how_much_too_large() -> None:
    need = placed("actmat", (600, 500), DeviceRoom("cuda")).device_bytes
    assert placed("actmat", (600, 500), DeviceRoom("cuda", need)).device_bytes == need
    found = placed("actmat", (600, 500), DeviceRoom("cuda", need - 1))
    assert found.words == f", on the host: it needs {need / 1e6:.3g} MB of a device, which has {need / 1e6:.3g} MB"
    assert found == dataclasses.replace(placed("actmat", (600, 500), HOST), words=found.words)


def test_memory_is_estimated_apart() -> None:
    """A large matrix on the device costs the host its base as stored, one delta at most, and chunks."""
    rows, columns, room = 8192, 4096, DeviceRoom("cuda")
    entries = rows * columns
    found = placed("actmat", (rows, columns), room)
    deltas, base = 4 * entries, 2 * entries
    workspace = 4 * get_method("actmat").cost.workspace((rows, columns), 3, get_method("actmat").resolve_options({}))
    assert found.device_bytes >= base + deltas + workspace
    assert found.device_bytes < 1.6 * (base + deltas + workspace)
    assert base < found.host_bytes <= base + deltas + 64 * 2**19
    held = placed("ties", (rows, columns), room)
    assert held.device_bytes >= base + 3 * deltas, "a method that streams on the host holds its deltas on a device"


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family.make(tmp_path, layers=1)


def plan_of(family: Family, **fields: Any) -> MergePlan:
    return library.plan(family.base, family.experts, **fields)


def test_a_plan_for_devices_is_data_too(family: Family) -> None:
    plan = plan_of(family, device="cuda:0,1", device_memory="40GB")
    assert MergePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.device == "cuda:0,1"
    assert plan.device_memory == 40 * 10**9
    assert {i.name for i in plan.on_device} >= {Q0, UP0}
    assert not {EMBEDDING, NORM} & {i.name for i in plan.on_device}
    assert plan.to_json()["totals"]["peak_device_bytes"] == plan.peak_device_bytes
    assert plan.peak_device_bytes == max(i.cost.device_bytes for i in plan.items) > 0


def test_the_number_of_devices_does_not_change_the_result_but_their_kind_does(family: Family) -> None:
    one, two, all_, host = (plan_of(family, device=d).fingerprint() for d in ("cuda:1", "cuda:0,1", "cuda", "cpu"))
    assert one == two == all_ != host
    assert plan_of(family, device="cuda", device_memory="40MB").fingerprint() == all_
    assert plan_of(family, device="cuda", device_memory=1_000).fingerprint() != all_, "other tensors are moved"


def test_the_screen_shows_where_and_why(family: Family) -> None:
    outcome = actmat(family.argv("-m", "actmat", "--device", "cuda:0,2", "--device-memory", "24GB", command="plan"))
    said = " ".join(outcome.out.split())
    assert outcome.code == 0
    assert "devices: cuda:0,2: 4 of 7 tensors" in said
    assert "needs the most, 4.2 MB; limit per tensor 24 GB" in said
    assert "1-D norm: mean of the deltas, on the host: elementwise" in said
    assert "name ends in q_proj: actmat, on cuda" in said
    assert "devices" not in actmat(family.argv(command="plan")).out


def test_problems_with_devices_come_with_all_others(family: Family) -> None:
    outcome = actmat(family.argv("--device", "cuda:0,0", "--method", "tie", command="plan"))
    assert outcome.code == 1
    assert "0 is given 2 times" in outcome.err
    assert "Did you mean 'ties'?" in outcome.err
    outcome = actmat(family.argv("--device-memory", "1GB", "--method", "tie", command="plan"))
    assert "none is given: add --device" in outcome.err
    assert "Did you mean 'ties'?" in outcome.err


def test_a_pool_is_placed_as_one_matrix(tmp_path: Path) -> None:
    samples = Samples.checkpoints(tmp_path)
    plan = library.plan(samples.base, samples.experts, method="actmat", device="cuda", pool=["*layers.0.self_attn*"])
    q, k = (plan.by_name[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qk")
    assert q.cost.device_bytes == k.cost.device_bytes > 0
    assert q.reason.endswith("actmat, pooled over 2 tensors, on cuda")
    (unit,) = (u for u in plan_units([plan], [()], None) if len(u.groups) == 2)
    assert unit.device_bytes == q.cost.device_bytes


def test_adapters_stay_on_the_host(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_adapter(tmp_path / f"a{seed}", "llama", seed, **LLAMA)
    adapters = [tmp_path / "a1", tmp_path / "a2"]
    plan = library.plan(None, adapters, device="cuda")
    assert not plan.on_device
    assert "adapters are merged on the host, not on a device: their factors are small" in map(str, plan.notes)
    tiny("llama").save_pretrained(tmp_path / "base")
    into_model = library.plan(tmp_path / "base", adapters, device="cuda")
    assert any(i.reason.endswith("in factored form, on the host: factors are small") for i in into_model.items)
    dense = library.plan(tmp_path / "base", adapters, device="cuda", method="ties")
    assert dense.on_device, "deltas that are formed are merged where the method computes"


def test_variants_are_placed_together(family: Family) -> None:
    """Elementwise variants go along; if one is too large for a device, all stay on the host."""
    actmat_, average, ties = (plan_of(family, device="cuda", method=m) for m in ("actmat", "average", "ties"))

    def bytes_of(*plans: MergePlan) -> int:
        units = plan_units(plans, [()] * len(plans), None)
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
    moved = [u for u in plan_units(plans, [()] * 2, None) if u.name == UP0]
    assert plans[0].by_name[UP0].cost.device_bytes == need
    assert moved[0].device_bytes == 0
    assert moved[0].host_bytes > need
