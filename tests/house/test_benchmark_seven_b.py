"""The benchmark of a 7 B merge: hollow checkpoints plan as real ones, lines are lines, estimates are for the whole."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.common import announced
from benchmarks.make_llama import Size, write_checkpoint
from benchmarks.seven_b import OLMO, arguments_of, extrapolated, hollow, merged, on_line, size_of

TINY = Size(hidden=16, intermediate=24, layers=1, heads=2, key_value_heads=2, vocabulary=20)


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    sizes = {n: getattr(TINY, n) for n in ("hidden", "intermediate", "heads", "key_value_heads", "vocabulary")}
    return argparse.Namespace(**sizes, work=tmp_path, experts=2, change=1e-2, device="cpu", threads=1, of=5)


def test_the_shape_is_that_of_a_model_of_7_b() -> None:
    assert 7.29e9 < OLMO.parameters() < 7.31e9
    assert OLMO.tensors()["model.layers.31.mlp.down_proj.weight"] == (4096, 11008)


def test_a_hollow_checkpoint_has_the_header_and_length_of_a_real_one_but_takes_no_room(tmp_path: Path) -> None:
    size = replace(TINY, vocabulary=100_000)
    write_checkpoint(tmp_path / "real", size)
    real, hole = (folder / "model.safetensors" for folder in (tmp_path / "real", hollow(tmp_path / "hollow", size)))
    assert hole.stat().st_size == real.stat().st_size
    header = 8 + int.from_bytes(real.read_bytes()[:8], "little")
    assert hole.read_bytes()[:header] == real.read_bytes()[:header]
    assert hole.stat().st_blocks * 512 < 100_000 < real.stat().st_blocks * 512


def test_values_lie_on_the_line_through_two_rows() -> None:
    few, many = {"layers": 1, "wall_s": 5.0}, {"layers": 3, "wall_s": 9.0}
    assert [on_line(few, many, "wall_s", n) for n in (1, 3, 32)] == [5.0, 9.0, 67.0]


@pytest.mark.slow
def test_a_merge_is_measured_and_the_whole_model_estimated_from_headers(given: argparse.Namespace) -> None:
    few = merged("average", size_of(given), given)
    assert few["what"] == "measured"
    assert few["wall_s"] > 0
    assert few["peak_anonymous_b"] > 10 << 20
    many = few | {"layers": 3, "wall_s": few["wall_s"] + 2.0}
    whole = extrapolated([few, many], replace(TINY, layers=5), given)
    assert (whole["layers"], whole["what"]) == (5, "extrapolated")
    assert whole["wall_s"] == pytest.approx(few["wall_s"] + 4.0)
    layer = replace(TINY, layers=2).parameters() - TINY.parameters()
    headers = whole["write_b"] - few["write_b"] - 4 * layer * 2
    assert 0 < headers < 4 * 9 * 200  # nine tensors a layer, some hundred bytes of header each
    assert not (given.work / "out" / "seven-b-average").exists()
    base, *experts = (given.work / "hollow" / name for name in ("base", "expert-0", "expert-1"))
    assert announced(arguments_of(base, experts, "tsv", "cpu"))["write_bytes"] == whole["write_b"]
