"""Strategies of reading: the plan counts by them, the engine reads by them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.samples import Samples

import actmat
from actmat.checkpoints.base import TensorSpec
from actmat.experts.deltas import DeltaSource
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.methods.post import Step
from actmat.planning.item import Item, MethodCall, Reading, Target, Write
from actmat.planning.regions import CHUNK, Region
from actmat.planning.work import HELD_BYTES, reading_of, shared_reading

Q, UP, NORM = (f"model.{n}.weight" for n in ("layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", "norm"))
SMALL, LARGE = CHUNK, HELD_BYTES // 8 + 1
STEP = (Step("mean_norm", {}),)


def planned(name: str, post: tuple[Step, ...] = (), kind: Any = "stored", **options: Any) -> Item:
    """An item with two experts."""
    call = MethodCall(name, get_method(name).resolve_options(options), post=post)
    sources = (DeltaSource("w", kind, "float32", 8),) * 2
    target = Target(TensorSpec("w", (8,), "float32", ""), TensorLayout(Role.VECTOR, ""), sources=sources)
    return Item(target, "merge", "", Write("sum"), call)


def read(name: str, numel: int, **how: Any) -> Reading:
    region = Region(0, numel, (numel,), TensorLayout(Role.VECTOR, ""))
    return reading_of(planned(name, **how), [region], 4)


@pytest.mark.parametrize(
    ("name", "numel", "expected"),
    [
        ("sce", LARGE, Reading("held")),
        ("breadcrumbs", LARGE, Reading("chunks", base_held=False)),
        ("average", SMALL, Reading("each")),
        ("dare", SMALL, Reading("chunks")),
        ("dare", 2 * CHUNK, Reading("chunks", base_held=False)),
        ("ties", 2 * CHUNK, Reading("held")),
        ("ties", LARGE, Reading("chunks", base_held=False)),
        ("karcher", SMALL, Reading("combine", base_held=False)),
        ("karcher", 2 * CHUNK, Reading("combine", base_held=False)),
        ("karcher", LARGE, Reading("combine", base_held=False)),
    ],
)
def test_a_method_on_its_own(name: str, numel: int, expected: Reading) -> None:
    assert read(name, numel) == expected


def test_steps_are_given_whole_deltas() -> None:
    for name in ("dare", "ties", "karcher", "model_stock"):
        assert read(name, LARGE, post=STEP) == Reading("held")
        assert read(name, LARGE, kind="formed") == Reading("held")
        assert not read(name, LARGE).base_held
    assert read("average", SMALL, post=STEP) == Reading("held")
    assert read("ties", LARGE, trim="global") == Reading("held")


def test_deltas_in_memory() -> None:
    whole = {name: read(name, LARGE).whole_deltas(5) for name in ("sce", "average", "breadcrumbs", "ties", "karcher")}
    assert whole == {"sce": 5, "average": 1, "breadcrumbs": 0, "ties": 0, "karcher": 0}
    assert read("ties", SMALL).whole_deltas(5) == 5, "the first pass keeps what it reads"


def item(method: str, reading: Reading | None) -> Item:
    return dataclasses.replace(planned(method), reading=reading)


def test_outputs_that_share_a_reading() -> None:
    """One alone is read as planned; several, and one that is observed, are given all deltas; a copy holds the base."""
    combined = item("karcher", Reading("combine", base_held=False))
    streamed = item("dare", Reading("chunks", base_held=False))
    copied = dataclasses.replace(combined, action="copy", call=None, reading=None)
    factored = dataclasses.replace(combined, reading=Reading("factors"))
    held = Reading("held")
    assert shared_reading([combined], observed=False) == combined.reading
    assert shared_reading([combined], observed=True) == held
    assert shared_reading([copied, combined], observed=False) == Reading("combine")
    assert shared_reading([combined, streamed], observed=False) == held
    assert shared_reading([copied, copied], observed=True) is None
    assert shared_reading([factored, copied, factored], observed=True) == Reading("factors")
    assert shared_reading([factored, streamed], observed=False) == held


PLANS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str, bool]]]] = {
    "dense": ({}, {UP: ("sum", "each", True), NORM: ("sum", "each", False)}),
    "combine": ({"method": "karcher"}, {UP: ("sum", "combine, base streamed", True)}),
    "held": ({"method": "sce"}, {UP: ("sum", "held", True)}),
    "observed": ({"method": "ties", "post": ["isotropize"]}, {UP: ("sum", "held", True)}),
    "copy": ({"keep": [UP]}, {UP: ("sum", "None", False)}),
    "extracted": ({"to": "adapter", "rank": 2}, {UP: ("svd", "each", True), NORM: ("sum", "each", False)}),
}


@pytest.mark.parametrize("kind", PLANS)
def test_the_plan_says_how_each_item_is_made(kind: str, tmp_path: Path) -> None:
    samples = Samples.checkpoints(tmp_path)
    fields, expected = PLANS[kind]
    plan = actmat.plan(samples.base, samples.experts, **fields)
    found = {n: (i.write.kind, str(i.reading), i.action == "merge") for n, i in plan.by_name.items() if n in expected}
    assert found == expected


def test_ties_of_other_sizes_are_read_alike() -> None:
    """Blocks of one tensor have one reading: that of the largest."""
    regions = [Region(0, n, (n,), TensorLayout(Role.VECTOR, "")) for n in (SMALL, LARGE)]
    assert reading_of(planned("ties"), regions, 4) == read("ties", LARGE)
