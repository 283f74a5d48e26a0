"""Parts of a tensor: every byte once, in order, whatever the role; the memory they are charged for."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actmat.checkpoints.base import TensorSpec
from actmat.experts.deltas import DeltaSource
from actmat.layout.types import Block, Role, TensorLayout
from actmat.linalg.chunks import CHUNK_ENTRIES
from actmat.methods import all_methods, get_method
from actmat.methods.contract import MergeMethod
from actmat.methods.facets import ActsOn
from actmat.methods.post import Step
from actmat.planning import regions as regions_module
from actmat.planning.cost import MATRIX_BYTES, call_of, region_peak_bytes
from actmat.planning.item import Item, MethodCall, Reading, Target, Write
from actmat.planning.regions import CHUNK, Region, cut
from actmat.planning.work import HELD_BYTES, HOST, place, reading_of
from actmat.recipe import make_recipe

LINEAR = TensorLayout(Role.LINEAR, "")
KINDS: tuple[ActsOn, ...] = ("matrix", "tensor", "elementwise")


@st.composite
def layouts(draw: st.DrawFn, roles: Sequence[Role] = tuple(Role)) -> tuple[tuple[int, ...], TensorLayout]:
    """A shape and a layout that fits it."""
    role = draw(st.sampled_from(roles))
    sizes = st.integers(1, 6)
    orientation = draw(st.sampled_from(["OI", "IO"]))
    if role in (Role.LINEAR, Role.EMBEDDING):
        return (draw(sizes), draw(sizes)), TensorLayout(role, "", orientation if role is Role.LINEAR else "OI")
    if role is Role.CONVOLUTION:
        return (draw(sizes), draw(sizes), draw(sizes)), TensorLayout(role, "")
    if role in (Role.VECTOR, Role.BUFFER):
        return tuple(draw(st.lists(sizes, max_size=2))), TensorLayout(role, "")
    heights = draw(st.lists(sizes, min_size=1, max_size=4))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    stops = [sum(heights[: i + 1]) for i in range(len(heights))]
    blocks = [
        Block(f"b{i}", stop - height, stop, groups) for i, (stop, height) in enumerate(zip(stops, heights, strict=True))
    ]
    width = draw(sizes)
    matrix = (sum(heights) * groups, width) if orientation == "OI" else (width, sum(heights) * groups)
    layout = TensorLayout(role, "", orientation, tuple(draw(st.permutations(blocks))))
    return ((draw(st.integers(1, 3)), *matrix) if role is Role.STACKED_EXPERTS else matrix), layout


@given(layouts(), st.sampled_from(KINDS), st.sampled_from([1, 7, CHUNK]))
def test_parts_cover_every_entry_once_in_order(
    shaped: tuple[tuple[int, ...], TensorLayout], acts_on: ActsOn, chunk: int
) -> None:
    shape, layout = shaped
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions_module, "CHUNK", chunk)
        regions = cut(shape, layout, acts_on)
    assert [regions[0].start, *(p.stop for p in regions)] == [*(p.start for p in regions), math.prod(shape)]
    assert all(math.prod(p.shape) == p.numel > 0 for p in regions)
    labels = [p.label for p in regions]
    assert acts_on == "elementwise" or len(set(labels)) == len(labels)


@given(layouts())
def test_matrices_of_the_parts_are_those_of_the_tensor(shaped: tuple[tuple[int, ...], TensorLayout]) -> None:
    """Cutting must not change what a matrix rule sees, only in which order."""
    shape, layout = shaped
    if not layout.role.is_matrix:
        return
    tensor = torch.arange(math.prod(shape)).view(shape)
    seen = sorted(
        m.tolist()
        for p in cut(shape, layout, "matrix")
        for batch in p.layout.to_matrices(tensor.flatten()[p.start : p.stop].view(p.shape))
        for m in batch.reshape(-1, *batch.shape[-2:])
    )
    expected = sorted(m.tolist() for b in layout.to_matrices(tensor) for m in b.reshape(-1, *b.shape[-2:]))
    assert seen == expected


def test_empty_and_scalar_tensors() -> None:
    vector = TensorLayout(Role.VECTOR, "")
    assert [(p.start, p.stop, p.shape) for p in cut((), vector, "elementwise")] == [(0, 1, (1,))]
    assert [(p.start, p.stop) for p in cut((0, 4), vector, "elementwise")] == [(0, 0)]
    assert [(p.start, p.stop) for p in cut((0, 4), LINEAR, "matrix")] == [(0, 0)]


def test_labels_name_experts_and_blocks() -> None:
    blocks = (Block("up", 2, 4), Block("gate", 0, 2))
    layout = TensorLayout(Role.STACKED_EXPERTS, "", "OI", blocks)
    assert [p.label for p in cut((2, 4, 3), layout, "matrix")] == ["0/gate", "0/up", "1/gate", "1/up"]
    assert [p.label for p in cut((2, 4, 3), layout, "tensor")] == [""]


def test_interleaved_and_transposed_blocks_stay_whole() -> None:
    interleaved = TensorLayout(Role.FUSED_LINEAR, "", "OI", (Block("q", 0, 1, 2), Block("k", 1, 2, 2)))
    transposed = TensorLayout(Role.FUSED_LINEAR, "", "IO", (Block("q", 0, 2), Block("k", 2, 4)))
    assert len(cut((4, 3), interleaved, "matrix")) == len(cut((3, 4), transposed, "matrix")) == 1


STEP = (Step("mean_norm", {}),)


def item(name: str, shape: tuple[int, ...], experts: int, layout: TensorLayout, stored: str) -> Item:
    source = DeltaSource("w", "stored", "bfloat16", 2 * math.prod(shape))
    target = Target(TensorSpec("w", shape, stored, ""), layout, sources=(source,) * experts)
    return Item(target, "merge", "", Write("sum"), MethodCall(name, get_method(name).resolve_options({})))


def peak(
    name: str,
    shape: tuple[int, ...],
    experts: int = 3,
    layout: TensorLayout = LINEAR,
    *,
    post: tuple[Step, ...] = (),
    stored: str = "bfloat16",
    compute_dtype: str = "float32",
) -> int:
    fields = {"base": "b", "experts": [f"e{t}" for t in range(experts)], "compute_dtype": compute_dtype}
    planned = item(name, shape, experts, layout, stored)
    planned = dataclasses.replace(planned, call=dataclasses.replace(call_of(planned), post=post))
    return place(planned, make_recipe(fields), HOST)[1].host_bytes


@pytest.mark.parametrize("method", all_methods(), ids=lambda m: m.name)
def test_more_of_anything_costs_no_less(method: MergeMethod) -> None:
    name = method.name
    small = peak(name, (64, 64))
    assert small > 0
    assert peak(name, (2048, 64)) >= small
    assert peak(name, (2048, 2048)) >= peak(name, (2048, 64))
    assert peak(name, (64, 64), stored="float32") >= small
    assert peak(name, (64, 64), compute_dtype="float64") > small
    assert peak(name, (64, 64), post=STEP) >= small


def test_a_one_pass_rule_pays_for_one_delta_and_a_streamed_one_for_a_piece() -> None:
    assert get_method("actmat").access.one_pass
    assert peak("actmat", (1024, 1024), experts=12) == peak("actmat", (1024, 1024), experts=2)
    assert peak("actmat", (1024, 1024), 12, post=STEP) > peak("actmat", (1024, 1024), 2, post=STEP)
    assert peak("average", (8192, 8192)) == peak("average", (4096, 4096))


def test_a_rule_that_streams_pays_for_a_place_of_each_expert() -> None:
    dare = get_method("dare")
    assert dare.streams(dare.resolve_options({}))
    assert not dare.streams(dare.resolve_options({"rescale": "l1"}))
    more = peak("dare", (4096, 4096), experts=12) - peak("dare", (4096, 4096), experts=2)
    assert more <= 10 * 4 * 2 * CHUNK_ENTRIES, "a place of each delta and of each vote"
    assert peak("dare", (4096, 4096), post=STEP) > peak("dare", (4096, 4096)) + 2 * 4 * 4096**2


def strategy(name: str, entries: int, **options: Any) -> str:
    planned = item(name, (entries,), 3, TensorLayout(Role.VECTOR, ""), "bfloat16")
    call = dataclasses.replace(call_of(planned), options=get_method(name).resolve_options(options))
    return reading_of(
        dataclasses.replace(planned, call=call), [Region(0, entries, (entries,), planned.layout)], 4
    ).strategy


def test_a_rule_that_walks_again_is_given_small_deltas_whole() -> None:
    ties = get_method("ties")
    for entries, held in ((HELD_BYTES // 12, True), (HELD_BYTES // 12 + 1, False)):
        assert strategy("ties", entries) == ("held" if held else "chunks")
        assert strategy("dare", entries) == "chunks"
    assert not ties.streams(ties.resolve_options({"trim": "global"})), "its survey is given whole deltas"
    assert strategy("model_stock", HELD_BYTES, filter_wise=True) == "held"
    more = peak("ties", (2**15, 2**14), experts=3) - peak("ties", (2**12, 2**12), experts=3)
    assert more <= (2**29 - 2**24) * 4 - 2**24 * (12 + 2) + 2**26, "the result grows; the base and deltas do not"


@pytest.mark.parametrize("name", ["model_stock", "karcher", "slerp"])
def test_a_sum_that_is_written_place_by_place_pays_for_nothing_that_grows(name: str) -> None:
    small, large = (peak(name, (entries,), experts=2) for entries in (2 * CHUNK, 2**35))
    assert small == large <= 2**25
    stepped = peak(name, (2**35,), experts=2, post=STEP)
    assert stepped >= 2**35 * (3 * 4 + 2), "who measures deltas is given them, and a result"


def test_a_stack_costs_what_one_of_its_matrices_costs() -> None:
    stack = TensorLayout(Role.STACKED_EXPERTS, "")
    assert peak("actmat", (64, 32, 32), layout=stack) == peak("actmat", (1, 32, 32), layout=stack)


def test_the_peak_holds_deltas_and_workspace() -> None:
    """actmat on 8 x 8, float32, one delta alive: base in bfloat16, one piece of an expert, delta, workspace."""
    merged = item("actmat", (8, 8), 3, LINEAR, "bfloat16")
    method = get_method("actmat")
    expected = (
        MATRIX_BYTES + 64 * 2 + CHUNK * 8 + 4 * (64 + method.cost.workspace((8, 8), 3, method.resolve_options({})))
    )
    assert region_peak_bytes(cut((8, 8), LINEAR, "matrix")[0], merged, Reading("each"), 4) == expected
