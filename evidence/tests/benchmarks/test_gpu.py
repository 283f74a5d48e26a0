"""Device memory that was measured on a GPU (`results/gpu.json`) against the memory that a plan states."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmarks.common import read_result

import actmat
from actmat.planning import MergePlan

LAYERS = [row for part in read_result("gpu")["rows"] if part["part"].startswith("layer") for row in part["rows"]]
MOST = 2.7
"""The largest ratio: of `ct_merging`, which declares for the host's decompositions of square matrices."""


def write_hole(path: Path, shape: tuple[int, ...]) -> None:
    """A file of one tensor in bfloat16: a header, and a hole of the disk where the values would be."""
    size = 2 * math.prod(shape)
    header = json.dumps({"layer.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def planned(folder: Path, method: str, shape: tuple[int, ...], experts: int) -> MergePlan:
    """The plan of one matrix on a device that has room for all; of files with a header and a hole."""
    places = [folder / str(number) for number in range(experts + 1)]
    for place in places:
        place.mkdir()
        write_hole(place / "model.safetensors", shape)
    base, *others = places
    return actmat.plan(base, others, method=method, scope="all", device="cpu:0", device_memory=1 << 40)


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: f"{row['method']}-{row['shape']}")
def test_the_planned_memory_of_a_device_holds_the_measured_peak(row: dict[str, Any], tmp_path: Path) -> None:
    """`merge_matrices` holds all three deltas, also of methods that a merge gives one at a time."""
    rows, columns = map(int, row["shape"].split("x"))
    plan = planned(tmp_path, row["method"], (rows, columns), row["experts"])
    (item,) = plan.items
    assert item.reading is not None
    further = (row["experts"] - item.reading.whole_deltas(row["experts"])) * math.prod((rows, columns)) * 4
    assert 1.0 <= (item.cost.device_bytes + further) / row["peak_b"] <= MOST


def test_measured_layers_cover_the_eigensolver() -> None:
    """The wide layers, where `actmat` decomposes the whole of a Gram matrix, need the most."""
    wide = {(row["method"], row["shape"]) for row in LAYERS}
    assert {("actmat", "4096x11008"), ("actmat", "8192x28672")} <= wide
