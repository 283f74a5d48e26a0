"""Plans in files, divided into parts, and compared in words."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from tests.helpers.merging import Family

import actmat
from actmat.engine.units import Unit, plan_units
from actmat.errors import RecipeError
from actmat.extras.parts.differences import plan_differences
from actmat.extras.parts.plan_files import read_plan, write_plan
from actmat.extras.parts.shares import Part, plan_part, share_units, work_of
from actmat.planning import MergePlan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> MergePlan:
    family = Family.make(tmp_path_factory.mktemp("family"), layers=4)
    return actmat.plan(family.base, family.experts, method="ties", options={"trim": "global"})


def test_a_plan_from_its_file(plan: MergePlan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.json")
    found = read_plan(tmp_path / "plan.json")
    assert found == plan
    assert found.fingerprint() == plan.fingerprint()


def test_options_that_are_infinite_are_kept(plan: MergePlan, tmp_path: Path) -> None:
    first = next(i for i in plan.items if i.call is not None)
    assert first.call is not None
    call = dataclasses.replace(first.call, options={"a": math.inf, "b": [1.0, {"c": -math.inf}]})
    other = dataclasses.replace(plan, items=(dataclasses.replace(first, call=call),))
    write_plan(other, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == other


@pytest.mark.parametrize("text", ["", '{"actmat_plan":1,"a":1}', '{"actmat_plan":3,"unknown":1}', '{"actmat_plan":3,'])
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RecipeError, match=r"expected a plan of layout 3|the plan is damaged"):
        read_plan(tmp_path / "plan.json")


def test_shares_have_every_unit_once_whatever_is_done(plan: MergePlan) -> None:
    units = plan_units([plan], [()], None)
    for parts in (1, 3, 50):
        shares = share_units(units, parts)
        assert sorted(u.name for share in shares for u in share) == sorted(u.name for u in units)
        named = [plan_part(plan, Part(k, parts)).names for k in range(1, parts + 1)]
        assert [[u.name for u in share] for share in shares] == list(map(list, named))


def test_shares_are_balanced_by_cost() -> None:
    units = [Unit(((),), f"u{n}", traffic=10 + n % 7, host_bytes=0, flops=1000 * (n % 3)) for n in range(500)]
    loads = [sum(map(work_of, share)) for share in share_units(units, 16)]
    assert max(loads) <= 1.02 * sum(loads) / 16
    large = [Unit(((),), "large", 10**6, 0), *units]
    shares = share_units(large, 4)
    assert [u.name for u in next(s for s in shares if large[0] in s)] == ["large"]


def test_a_part_of_the_plan(plan: MergePlan) -> None:
    parts = [plan_part(plan, Part(k, 3)) for k in (1, 2, 3)]
    assert sum(p.work for p in parts) == pytest.approx(1)
    assert max(p.work for p in parts) == parts[0].largest
    assert sum(p.read_bytes for p in parts) == plan.read_bytes
    merged = [i for i in plan.items if i.call is not None and i.call.method == "ties"]
    assert parts[0].survey_bytes == sum(i.cost.read_bytes for i in merged)
    assert parts[1].to_json()["part"] == "2/3"


def test_differences_are_told(plan: MergePlan) -> None:
    replace = dataclasses.replace
    (file,) = plan.experts[0].files
    expert = replace(plan.experts[0], files=(replace(file, size=1),))
    gone, first = replace(plan.experts[0], files=()), plan.items[0]
    for other, said in [
        (replace(plan, experts=(expert, *plan.experts[1:])), f"has {file.size} bytes there, 1 here"),
        (replace(plan, experts=(gone, *plan.experts[1:])), "is missing here"),
        (replace(plan, experts=plan.experts[1:]), "there are 3 inputs there, 2 here"),
        (replace(plan, versions={**plan.versions, "torch": "0"}), "version of torch: "),
        (replace(plan, device="cuda:1"), "device: cpu there, cuda here"),
        (replace(plan, statistics_identity=(1,)), "statistics are others"),
        (replace(plan, items=plan.items[1:]), f"{len(plan.items)} tensors would be merged there"),
        (replace(plan, items=(replace(plan.items[0], reason="?"), *plan.items[1:])), "in another way"),
        (
            replace(plan, items=(replace(first, cost=replace(first.cost, device_bytes=1)), *plan.items[1:])),
            f"tensor '{first.name}' would be merged on the host there, on a device here",
        ),
        (plan, "the plans differ"),
    ]:
        (found,) = plan_differences(plan, other)
        assert said in found
