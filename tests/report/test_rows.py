"""Manifests written row by row: the text and the hashes that a manifest in memory would have."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmat.checkpoints.base import TensorSpec
from actmat.diagnostics.totals import totals_of
from actmat.engine.record import Record
from actmat.errors import OutputError
from actmat.experts.deltas import DeltaSource
from actmat.layout.types import Role, TensorLayout
from actmat.planning import MergePlan
from actmat.planning.item import Item, Target, Write
from actmat.planning.model import InputSummary
from actmat.recipe import make_recipe
from actmat.report.manifest import hashes_of
from actmat.report.rows import StreamedRows
from actmat.run.output import JournalRecords

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=5))
def test_json_in_pieces(fields: dict[str, Any]) -> None:
    streamed = {k: StreamedRows(v.copy) if isinstance(v, list) else v for k, v in fields.items()}
    for style in ({"indent": 1, "ensure_ascii": False}, {"sort_keys": True, "separators": (",", ":")}):
        assert "".join(json.JSONEncoder(**style).iterencode(streamed)) == json.dumps(fields, **style)


def sources_of(name: str, in_experts: list[dict[str, str]]) -> tuple[DeltaSource | None, ...]:
    return tuple(DeltaSource(e[name], "stored", "float32", 8) if name in e else None for e in in_experts)


def plan_of(names: list[str], in_experts: list[dict[str, str]]) -> MergePlan:
    """A plan of these tensors; per expert, the name that each has there, if any."""
    layout = TensorLayout(Role.LINEAR, "linear")
    summary = InputSummary("e", "e", (), 1, 1)
    items = tuple(
        Item(Target(spec, layout, sources=sources_of(spec.name, in_experts)), "merge", "why", Write("sum", (spec,)))
        for spec in (TensorSpec(n, (2,), "float32", "") for n in names)
    )
    recipe = make_recipe({"base": "b", "experts": [f"e{t}" for t in range(len(in_experts))]})
    specs = tuple(i.outputs[0] for i in items)
    return MergePlan(recipe, "model", summary, (summary,) * len(in_experts), items, specs, 10**6, {"": "model"})


def record(name: str, experts: int) -> Record:
    return Record(
        name, f"out-{name}", {name: f"out-{name}"}, f"base-{name}", tuple(f"{t}-{name}" for t in range(experts))
    )


def test_contents_of_inputs_whose_names_have_another_order() -> None:
    names = ["b", "a", "c"]
    in_experts = [{n: n for n in names}, {n: f"model.{n}" for n in names}, {"a": "z", "b": "y"}]
    plan = plan_of(names, in_experts)
    records = {n: record(n, 3) for n in names}
    of_items, of_base, of_experts = hashes_of(plan, records)
    assert of_items == {n: f"out-{n}" for n in names}
    assert of_base == {n: f"base-{n}" for n in names}
    for t, expert in enumerate(in_experts):
        assert of_experts[t] == {stored: f"{t}-{n}" for n, stored in expert.items()}


def test_records_are_read_from_the_journal_when_they_are_asked_for() -> None:
    journal = {"a": record("a", 1).to_json()}
    records = JournalRecords(journal)
    assert dict(records) == {"a": record("a", 1)}
    assert len(records) == 1
    del journal["a"]["hash"]
    with pytest.raises(OutputError, match="its entry of 'a' is damaged"):
        JournalRecords(journal)["a"]


def test_totals() -> None:
    records = {n: dataclasses.replace(record(n, 1), unchanged=n == "a") for n in "ab"}
    found = totals_of(plan_of(["a", "b"], [{}]), records)
    assert (found.unchanged, found.norms) == (1, None)
