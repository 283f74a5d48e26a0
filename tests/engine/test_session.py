"""Sessions of units: measures without outputs, findings, and the device that a unit computes on."""

import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any

from tests.helpers.merging import NORM, Q0, UP0, Family
from tests.helpers.sessions import Run, merge_units, run_here

from actmat.diagnostics.observer import ItemObserver
from actmat.engine.devices import Device
from actmat.engine.findings import Findings
from actmat.engine.session import Session, SessionSpec
from actmat.engine.units import plan_units
from actmat.planning.work import DeviceRoom
from actmat.recipe import make_recipe
from actmat.run.inputs import open_inputs
from actmat.run.run import plan_all


def fields_of(folder: Path, **more: Any) -> dict[str, Any]:
    family = Family.make(folder, layers=1)
    return {"base": str(family.base), "experts": [str(e) for e in family.experts], **more}


def test_a_session_without_outputs_gives_the_same_measures(tmp_path: Path) -> None:
    spec, units, results = run_here([fields_of(tmp_path)], [tmp_path / "out"], functools.partial(ItemObserver, seed=0))
    found = merge_units(dataclasses.replace(spec, outputs=(None,)), units)
    measured = {r.unit.name: [record.observed for _, record in r.records] for r in results}
    assert {r.unit.name: [record.observed for _, record in r.records] for r in found} == measured
    assert {record.hash for r in found for _, record in r.records} == {""}


# Findings


def broken(folder: Path, **more: Any) -> Run:
    """NaN in two experts, one of them in two tensors."""
    fields = fields_of(folder, **more)
    family = Family(folder, folder / "base", (folder / "expert0", folder / "expert1"))
    family.change(family.experts[0], lambda t: (t[Q0][0, :3].fill_(float("nan")), t[NORM][1:2].fill_(float("inf"))))
    family.change(family.experts[1], lambda t: t[Q0][2, 2:3].fill_(float("nan")))
    spec, units, results = run_here([fields], [folder / "out"])
    return dataclasses.replace(spec, outputs=(None,)), units, results


def test_findings_of_units_add_up(tmp_path: Path) -> None:
    spec, units, _ = broken(tmp_path, allow_nonfinite=True)
    total = Findings(tolerated=True)
    for result in merge_units(spec, units):
        total.add(result.findings)
        (record,) = (rec for _, rec in result.records)
        assert record.nonfinite == {Q0: 4, NORM: 1}.get(record.name, 0)
    assert total.nonfinite == {(Q0, "expert 'expert0'"): 3, (Q0, "expert 'expert1'"): 1, (NORM, "expert 'expert0'"): 1}
    assert (total.count(Q0), total.count(NORM), total.count(UP0)) == (4, 1, 0)
    assert not total.fatal
    assert total.problems() == []


def test_findings_of_all_kinds_decide() -> None:
    one, tied, foreign = (Findings(tolerated=True) for _ in range(3))
    one.nonfinite["a", "the base"] += 2
    tied.broken_ties.append("two tensors differ")
    foreign.foreign_statistics.append("another model")
    for finding in (tied, foreign):
        total = Findings(tolerated=True)
        total.add(one)
        assert not total.fatal
        total.add(finding)
        assert total.fatal
    strict = Findings(tolerated=False)
    strict.add(one)
    assert strict.fatal
    assert pickle.loads(pickle.dumps(strict)) == strict


def test_after_a_failure_a_session_only_reads(tmp_path: Path) -> None:
    """The first bad tensor decides that nothing is kept; the others are read for their own bad values."""
    spec, units, _ = broken(tmp_path)
    with Session.open(spec) as session:
        session.inspect_only = True
        results = {u.name: session.merge(u) for u in units}
    assert not any(r.records for r in results.values())
    assert {n for n, r in results.items() if r.findings.nonfinite} == {Q0, NORM}


def test_one_matrix_method_is_enough_to_compute_on_the_device(tmp_path: Path) -> None:
    """Variants share the deltas of a tensor: they are where the most demanding method wants them."""
    fields = fields_of(tmp_path)
    for methods, moves in ((("average", "actmat"), True), (("actmat", "average"), True), (("average",), False)):
        recipes = [make_recipe(fields | {"method": m}) for m in methods]
        with open_inputs(recipes) as (inputs, _):
            plans = plan_all(inputs, DeviceRoom("cpu:0"))
            spec = SessionSpec(plans, fields["base"], (), (None,))
            session = Session(spec, inputs, [None] * 2, Device("cpu:0"))
            unit = next(u for u in plan_units(plans, [()] * len(plans), observed=False) if u.name == Q0)
            reader = session._opened(unit, Findings(tolerated=False))
            assert (unit.device_bytes > 0, not reader.on_host) == (moves, moves)
