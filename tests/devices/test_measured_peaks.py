"""Device memory that was measured on a GPU (`benchmarks/results/gpu.json`) against the memory that a plan states."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.helpers.devices import placed
from tests.helpers.repository import ROOT

from actmat.planning.placement import DeviceRoom

PARTS = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))["rows"]
LAYERS = [row for part in PARTS if part["part"].startswith("layer") for row in part["rows"]]
MOST = 2.4
"""The largest ratio: of the ridge, whose Cholesky factorization needs less than its declared workspace."""


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: f"{row['method']}-{row['shape']}")
def test_the_planned_memory_of_a_device_holds_the_measured_peak(row: dict[str, Any]) -> None:
    """`merge_matrices` holds all three deltas, also of methods that a merge gives one at a time."""
    rows, columns = map(int, row["shape"].split("x"))
    plan = placed(row["method"], (rows, columns), DeviceRoom("cuda"))
    assert plan.reading is not None
    further = (row["experts"] - plan.reading.whole_deltas(row["experts"])) * math.prod((rows, columns)) * 4
    assert 1.0 <= (plan.device_bytes + further) / row["peak_b"] <= MOST


def test_measured_layers_cover_the_eigensolver() -> None:
    """The wide layers, where `actmat` decomposes the whole of a Gram matrix, need the most."""
    wide = {(row["method"], row["shape"]) for row in LAYERS}
    assert {("actmat", "4096x11008"), ("actmat", "8192x28672")} <= wide
