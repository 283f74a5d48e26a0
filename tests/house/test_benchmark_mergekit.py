"""The configurations that were run in mergekit and here: all of the files have a row, and nearly all do the same."""

from __future__ import annotations

import json

import pytest
import yaml
from benchmarks.common import RESULTS
from benchmarks.mergekit.tables import GOOD, OUTCOMES
from tests.helpers.repository import ROOT

RESULT = json.loads((RESULTS / "mergekit.json").read_text(encoding="utf-8"))
ROWS = {row["name"]: row for row in RESULT["rows"]}
OTHERS = {"example_arcee_fusion", "task_arithmetic_normalize_by_filter", "multislerp_raw_weights"}
"""Configurations that the page lists as doing something else here."""


@pytest.mark.parametrize("name", ["cases", "mixtures"])
def test_every_configuration_has_a_row(name: str) -> None:
    cases = yaml.safe_load((ROOT / "benchmarks" / "mergekit" / f"{name}.yml").read_text(encoding="utf-8"))
    kind = {"mixture"} if name == "mixtures" else {case["merge_method"] for case in cases.values()}
    assert {row["kind"] for n, row in ROWS.items() if n in cases} == kind
    assert set(cases) <= set(ROWS)


def test_nearly_all_do_the_same() -> None:
    assert {row["outcome"] for row in ROWS.values()} <= set(OUTCOMES)
    assert {n for n, row in ROWS.items() if row["outcome"] not in GOOD} == OTHERS
    assert {row["outcome"] for row in ROWS.values() if row["kind"] == "mixture"} == {"same bits"}
