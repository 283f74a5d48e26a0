"""Adapters without a base through every front end, and devices that are none."""

from pathlib import Path

import pytest
from tests.helpers.adapters import LLAMA, save_adapter

import actmat
from actmat.errors import RecipeError
from actmat.report.verify import verify


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    for n in (1, 2):
        save_adapter(tmp_path / f"a{n}", "llama", n, **LLAMA)
    return [tmp_path / "a1", tmp_path / "a2"]


def test_experts_suffice_in_python(pair: list[Path], tmp_path: Path) -> None:
    plan = actmat.plan(experts=pair)
    assert (plan.output, plan.base, len(plan.items)) == ("adapter", None, 6)
    report = actmat.merge(experts=pair, out=tmp_path / "out", durable=False)
    assert report.plan == plan.__class__.from_json(report.plan.to_json())
    assert [i.name for i in report.plan.items] == [i.name for i in plan.items]
    assert verify(tmp_path / "out").ok
    diagnosis = actmat.diagnose(experts=pair)
    assert {m.name for m in diagnosis.measures} == {i.name for i in plan.items}


def test_no_experts_are_refused(tmp_path: Path) -> None:
    for function in (actmat.plan, actmat.diagnose):
        with pytest.raises(RecipeError, match="expert"):
            function()
    with pytest.raises(RecipeError, match="expert"):
        actmat.merge(out=tmp_path / "out")
