"""Sessions as values: what another process is given, what it returns, and the bytes that it writes."""

import concurrent.futures
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.grams import padded_batches
from tests.helpers.merging import NORM, Q0, UP0, Family
from tests.helpers.models import BY_NAME, VOCABULARY, save_family
from tests.helpers.sessions import Run, merge_units, run_here

from actmat.checkpoints.writing.writer import ShardWriter
from actmat.diagnostics.observer import Observers
from actmat.engine.devices import Device
from actmat.engine.findings import Findings
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.units import plan_units
from actmat.extras.collect.collect import collect
from actmat.extras.conformance.deltas import _other_process
from actmat.planning.work import DeviceRoom
from actmat.recipe import make_recipe
from actmat.run.inputs import open_inputs
from actmat.run.run import plan_all

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def process() -> concurrent.futures.ProcessPoolExecutor:
    return _other_process()


def full(folder: Path) -> list[Fields]:
    family = Family.make(folder, layers=1)
    return [{"base": str(family.base), "experts": [str(e) for e in family.experts], "max_shard_size": "2kB"}]


def variants(folder: Path) -> list[Fields]:
    """A survey of the whole model, random masks, and a matrix method."""
    (fields,) = full(folder)
    ties = {"method": "ties", "options": {"trim": "global"}, "scope": "all"}
    return [fields | ties, fields | {"method": "dare", "scope": "all"}, fields | {"method": "actmat"}]


def adapters(folder: Path) -> Fields:
    tiny("llama").float().save_pretrained(folder / "base")
    for seed in (1, 2):
        save_adapter(folder / f"a{seed}", "llama", seed, **LLAMA)
    return {"base": str(folder / "base"), "experts": [str(folder / "a1"), str(folder / "a2")]}


def into_model(folder: Path) -> list[Fields]:
    return [adapters(folder) | {"output": "model"}]


def into_adapter(folder: Path) -> list[Fields]:
    return [adapters(folder) | {"output": {"kind": "adapter", "rank": 3}}]


def with_statistics(folder: Path) -> list[Fields]:
    case = BY_NAME["gpt2"]
    base, experts = save_family(case, folder, n_experts=2)
    rows = []
    for n, place in enumerate(experts):
        model = case.loader.from_pretrained(place, dtype=torch.float32).eval()
        collect(model, padded_batches(VOCABULARY, n=2)[n:], out=folder / f"statistics{n}")
        rows.append({"path": str(place), "statistics": str(folder / f"statistics{n}")})
    return [{"base": str(base), "experts": rows, "method": "regmean"}]


CASES: Mapping[str, tuple[Callable[[Path], list[Fields]], bool]] = {
    "full": (full, False),
    "full, observed": (full, True),
    "variants": (variants, False),
    "adapters into a model": (into_model, False),
    "adapters into a model, observed": (into_model, True),
    "adapters into an adapter": (into_adapter, False),
    "adapters into an adapter, observed": (into_adapter, True),
    "with statistics": (with_statistics, False),
}


def timeless(result: UnitResult) -> UnitResult:
    """A result without the times in its records."""
    records = []
    for plan, record in result.records:
        records.append((plan, dataclasses.replace(record, seconds=0.0)))
    return dataclasses.replace(result, records=tuple(records))


def written(folders: list[Path]) -> list[dict[str, bytes]]:
    return [{p.name: p.read_bytes() for p in f.glob("*.safetensors")} for f in folders]


def here(make: Callable[[Path], list[Fields]], folder: Path, *, observed: bool = False) -> tuple[Run, list[Path]]:
    fields = make(folder)
    folders = [folder / f"here{n}" for n in range(len(fields))]
    return run_here(fields, folders, Observers(seed=0) if observed else None), folders


@pytest.mark.parametrize("name", CASES)
def test_another_process_gives_the_same_records_and_bytes(
    name: str, process: concurrent.futures.ProcessPoolExecutor, tmp_path: Path
) -> None:
    make, observed = CASES[name]
    (spec, units, results), folders = here(make, tmp_path, observed=observed)
    there = [tmp_path / f"there{n}" for n in range(len(folders))]
    for folder, plan in zip(there, spec.plans, strict=True):  # as the driver prepares them
        folder.mkdir()
        ShardWriter(folder, plan.shards, durable=False).close()
    elsewhere = dataclasses.replace(spec, outputs=tuple(there))
    found = process.submit(merge_units, elsewhere, units[::-1]).result(300)
    expected = {r.unit: timeless(r) for r in results}
    assert {r.unit: timeless(r) for r in found} == expected
    assert all(r.records for r in found)
    assert len(expected) == len(units) == len(found)
    assert any(rec.observed is not None for r in found for _, rec in r.records) == observed
    assert written(there) == written(folders)
    assert all(files for files in written(folders))


@pytest.mark.parametrize("name", ["full, observed", "variants", "adapters into an adapter, observed"])
def test_specs_and_results_are_plain_values(name: str, tmp_path: Path) -> None:
    make, observed = CASES[name]
    (spec, units, results), _ = here(make, tmp_path, observed=observed)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert [p.fingerprint() for p in again.plans] == [p.fingerprint() for p in spec.plans]
    assert pickle.loads(pickle.dumps(units)) == units
    assert pickle.loads(pickle.dumps(results)) == results
    assert bool(spec.surveys) == (name == "variants")


def test_a_session_without_outputs_gives_the_same_measures(tmp_path: Path) -> None:
    (spec, units, results), _ = here(full, tmp_path, observed=True)
    found = merge_units(dataclasses.replace(spec, outputs=(None,)), units)
    measured = {r.unit.name: [rec.observed for _, rec in timeless(r).records] for r in results}
    assert {r.unit.name: [rec.observed for _, rec in timeless(r).records] for r in found} == measured
    assert {rec.hash for r in found for _, rec in r.records} == {""}


# Findings


def broken(folder: Path, **more: Any) -> list[Fields]:
    """NaN in two experts, one of them in two tensors."""
    (fields,) = full(folder)
    family = Family(folder, folder / "base", (folder / "expert0", folder / "expert1"))
    family.change(family.experts[0], lambda t: (t[Q0][0, :3].fill_(float("nan")), t[NORM][1:2].fill_(float("inf"))))
    family.change(family.experts[1], lambda t: t[Q0][2, 2:3].fill_(float("nan")))
    return [fields | more]


def test_findings_of_units_add_up(process: concurrent.futures.ProcessPoolExecutor, tmp_path: Path) -> None:
    (spec, units, _), _ = here(lambda folder: broken(folder, allow_nonfinite=True), tmp_path)
    spec = dataclasses.replace(spec, outputs=(None,))
    total = Findings(tolerated=True)
    for result in process.submit(merge_units, spec, units).result(300):
        total.add(result.findings)
        (record,) = (rec for _, rec in result.records)
        assert record.nonfinite == {Q0: 4, NORM: 1}.get(record.name, 0)
    assert total.nonfinite == {(Q0, "expert 'expert0'"): 3, (Q0, "expert 'expert1'"): 1, (NORM, "expert 'expert0'"): 1}
    assert (total.count(Q0), total.count(NORM), total.count(UP0)) == (4, 1, 0)
    assert not total.fatal
    assert total.problems() == []


def test_a_unit_with_bad_values_gives_findings_and_no_records(
    process: concurrent.futures.ProcessPoolExecutor, tmp_path: Path
) -> None:
    (spec, units, results), _ = here(broken, tmp_path)
    found = process.submit(merge_units, dataclasses.replace(spec, outputs=(None,)), units).result(300)
    total = Findings(tolerated=False)
    for result in found:
        assert bool(result.records) != (result.unit.name in (Q0, NORM))
        assert result.findings.fatal == (result.unit.name in (Q0, NORM))
        total.add(result.findings)
    assert total.fatal
    assert total.problems() == [
        f"tensor '{Q0}' of expert 'expert0' has 3 values that are NaN or Inf",
        f"tensor '{Q0}' of expert 'expert1' has 1 value that is NaN or Inf",
        f"tensor '{NORM}' of expert 'expert0' has 1 value that is NaN or Inf",
    ]
    here_total = Findings(tolerated=False)
    for result in results:
        here_total.add(result.findings)
    assert here_total == total


def test_findings_of_all_kinds_add_up_and_decide() -> None:
    one, other = Findings(tolerated=True), Findings(tolerated=True)
    one.nonfinite["a", "the base"] += 2
    other.nonfinite["a", "the base"] += 1
    other.nonfinite["b", "expert 'x'"] += 5
    one.add(other)
    assert (one.count("a"), one.count("b"), one.fatal) == (3, 5, False)
    assert other.count("a") == 1, "what is added stays as it was"
    tied, foreign = Findings(tolerated=True), Findings(tolerated=True)
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
    (spec, units, _), _ = here(broken, tmp_path)
    with Session.open(dataclasses.replace(spec, outputs=(None,))) as session:
        session.inspect_only = True
        results = {u.name: session.merge(u) for u in units}
    assert not any(r.records for r in results.values())
    assert {n for n, r in results.items() if r.findings.nonfinite} == {Q0, NORM}


def test_one_matrix_method_is_enough_to_compute_on_the_device(tmp_path: Path) -> None:
    """Variants share the deltas of a tensor: they are where the most demanding method wants them."""
    (fields,) = full(tmp_path)
    for methods, moves in ((("average", "actmat"), True), (("actmat", "average"), True), (("average",), False)):
        recipes = [make_recipe(fields | {"method": m}) for m in methods]
        with open_inputs(recipes) as (inputs, _):
            plans = plan_all(inputs, DeviceRoom("cpu:0"))
            spec = SessionSpec(plans, fields["base"], (), (None,))
            session = Session(spec, inputs, [None] * 2, Device("cpu:0"))
            unit = next(u for u in plan_units(plans, [()] * len(plans), None) if u.name == Q0)
            reader = session._opened(unit, Findings(tolerated=False))
            assert (unit.device_bytes > 0, not reader.on_host) == (moves, moves)
