"""Predictions of plans: work of units at given rates, machines, what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.merging import EMBEDDING, UP0, Family, actmat
from tests.helpers.rates import RATE, rates_of

import actmat as library
from actmat.errors import RecipeError
from actmat.linalg.operations import Operation, total
from actmat.planning.cost import item_operations
from actmat.timing.predict import Prediction, duration, parse_nodes, predict
from actmat.timing.rates import save_rates
from actmat.timing.schedule import Cluster, simulate
from actmat.timing.work import Work, _Counter, work_of


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family.make(tmp_path, layers=2, experts=2)


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    save_rates(rates_of(cores=2, start_s=1.0), tmp_path / "rates.json")
    return tmp_path / "rates.json"


def test_work_of_one_tensor_by_hand(family: Family) -> None:
    plan = library.plan(family.base, family.experts)
    by_name = {w.name: w for w in work_of(plan, rates_of(), workers=1)}
    assert len(by_name) == len(plan.items)
    for name in (UP0, EMBEDDING):
        item, work = plan.by_name[name], by_name[name]
        nbytes = item.cost.read_bytes + item.cost.write_bytes
        passing = nbytes + item.numel * 3  # hashed; two deltas and one output
        assert work.seconds == pytest.approx((total(item_operations(item, "float32")) + passing) / RATE)
        assert (work.read_bytes, work.write_bytes) == (item.cost.read_bytes, item.cost.write_bytes)
        assert work.host_bytes == item.cost.host_bytes


def test_busy_cores_are_slower_and_tensors_cost_something(family: Family) -> None:
    plan = library.plan(family.base, family.experts)
    busy = {"matrix": 0.5, "entry": 0.25}
    alone = work_of(plan, rates_of(cores=2, busy=busy), workers=1)
    together = work_of(plan, rates_of(cores=2, busy=busy, tensor_s=1.0), workers=2)
    for one, other in zip(alone, together, strict=True):
        assert 2 * one.seconds < other.seconds - 1.0 <= 4 * one.seconds * (1 + 1e-9)


def test_units_begin_in_the_order_of_planned_time(family: Family) -> None:
    works = work_of(library.plan(family.base, family.experts), rates_of(), workers=1)
    assert works[0].name == "lm_head.weight"


def test_panels_are_those_that_the_workers_of_a_node_can_use(family: Family) -> None:
    """Half of the products have two panels, half have ten: five workers are 1 / (1/2 / 2 + 1/2 / 5) times as fast."""
    operations = [Operation("product", 1000, 64, panels=n) for n in (1, 2, 10)]
    plan = library.plan(family.base, family.experts)
    for workers, panels in ((1, 1.0), (5, 1 / (0.5 / 2 + 0.5 / 5)), (50, 1 / (0.5 / 2 + 0.5 / 10))):
        serial, shared, found = _Counter(plan, rates_of(), None, workers)._sums(operations)
        assert (serial, shared) == pytest.approx((1e-6, 2e-6))
        assert found == pytest.approx(panels)


def test_pools_are_one_unit(family: Family) -> None:
    stem = "model.layers.0.self_attn"
    for folder in (family.base, *family.experts):
        family.change(folder, lambda t: t.update({f"{stem}.v_proj.weight": t[f"{stem}.q_proj.weight"].clone()}))
    plan = library.plan(family.base, family.experts, pool=["*.layers.0.self_attn.*_proj.weight"])
    assert len(work_of(plan, rates_of(), workers=1)) == len(plan.items) - 1


def test_devices_take_their_own_rates(family: Family) -> None:
    recipe = library.plan(family.base, family.experts).recipe
    from actmat.api import plan_recipe

    plan = plan_recipe(recipe, device="cuda:0")
    with pytest.raises(RecipeError, match="have no device 'cuda'"):
        work_of(plan, rates_of(), workers=1)
    by_name = {w.name: w for w in work_of(plan, rates_of(devices=True), workers=1)}
    item = plan.by_name[UP0]
    nbytes = item.cost.read_bytes + item.cost.write_bytes
    operations = item_operations(item, "float32")
    passes = sum(o.flops for o in operations if o.kind == "entry")
    fast = (total(operations) - passes) / 100 + passes + nbytes  # over the link, and through the hash
    assert by_name[UP0].seconds == pytest.approx((fast + nbytes) / RATE)
    assert predict(plan, rates_of(cores=16, devices=True)).cluster.workers == 1
    two = plan_recipe(recipe, device="cuda:0,3")
    assert predict(two, rates_of(cores=16, devices=True)).cluster.workers == 2
    scarce = plan_recipe(recipe, device="cuda:0", device_memory=336_000_000)  # nothing fits beside the blocks
    assert not scarce.on_device
    assert work_of(scarce, rates_of(devices=True), workers=1) == work_of(plan_recipe(recipe), rates_of(), workers=1)


def test_machines_are_read() -> None:
    assert parse_nodes("3", workers=5) == (3, 5)
    assert parse_nodes(" 3x7 ", workers=5) == (3, 7)
    for bad in ("0", "2x0", "-1", "two", "2x", "1x2x3", "1.5"):
        with pytest.raises(RecipeError, match=r"such as 4 or 4x16"):
            parse_nodes(bad, workers=5)
    assert [duration(s) for s in (5.04, 660, 86400)] == ["5.0 s", "11.0 min", "24.0 h"]


def test_storage_of_a_cluster(family: Family) -> None:
    plan = library.plan(family.base, family.experts)
    own = predict(plan, rates_of(), "4x2")
    assert own.cluster.bandwidth == pytest.approx(RATE)
    shared = predict(plan, rates_of(), "4x2", bandwidth="2MB")
    assert shared.cluster.bandwidth == 5e5
    assert predict(plan, rates_of(), "4x2", bandwidth="2MB", network="100kB").cluster.bandwidth == 1e5
    assert predict(plan, rates_of(), "4x2", network="3MB").cluster.bandwidth == 3e6
    assert shared.simulation.makespan_s > own.simulation.makespan_s
    with pytest.raises(RecipeError, match="--network: A size looks like"):
        predict(plan, rates_of(), "1", network="fast")


def test_the_command_prints_the_prediction(family: Family, rates: Path) -> None:
    flags = ("--simulate", "2x2", "--rates", str(rates), "--bandwidth", "1GB")
    outcome = actmat(family.argv(*flags, command="plan"))
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "predicted on 2 nodes with 2 workers each, at the rates of node" in said
    assert "efficiency 1.00" in said
    data = json.loads(actmat(family.argv(*flags, "--json", "--full", command="plan")).out)["prediction"]
    assert data["seconds"] >= data["ideal_seconds"] >= data["start_seconds"] == 1.0
    assert data["nodes"] == data["workers_per_node"] == 2
    assert len(data["peak_bytes_per_node"]) == 2
    assert data["longest"]["name"] == "model.layers.0.mlp.down_proj.weight"


def test_a_schedule_that_wastes_workers_names_the_unit(family: Family, tmp_path: Path) -> None:
    slow = dict.fromkeys(rates_of().rates.compute, ((64, 10.0),))
    save_rates(rates_of(cores=2, compute=slow), tmp_path / "slow.json")
    outcome = actmat(family.argv("--simulate", "1x64", "--rates", str(tmp_path / "slow.json"), command="plan"))
    said = " ".join(outcome.out.split())
    assert "limited by 'model.layers.0.mlp.down_proj.weight', which takes" in said
    assert "of which one worker computes alone" in said


@pytest.mark.parametrize("flags", [("--bandwidth", "1GB"), ("--network", "1GB"), ("--rates", "x.json")])
def test_flags_of_a_simulation_need_one(flags: tuple[str, str], family: Family) -> None:
    outcome = actmat(family.argv(*flags, command="plan"))
    assert outcome.code == 2
    assert "are for --simulate" in " ".join(outcome.err.replace("│", " ").split())


def test_without_rates_the_command_says_how_to_get_them(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    outcome = actmat(family.argv("--simulate", "2", command="plan"))
    assert outcome.code == 1
    assert "actmat calibrate" in outcome.err


def test_units_that_read_and_compute_by_turns_are_no_units_fault() -> None:
    works = [Work(f"unit {k}", RATE, 0, serial_s=2.0) for k in range(64)]
    cluster = Cluster(nodes=1, workers=2, node_bandwidth=RATE)
    found = Prediction(rates_of(), cluster, simulate(works, cluster), 128.0, 128.0)
    assert found.simulation.efficiency < 0.9
    assert found.limit == "storage and computing, which take turns in each worker"
    assert found.to_json()["limited_by"] == found.limit
    assert f"limited by {found.limit}" in found.lines
