"""Adapters without a base through every front end, and devices that are none."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.merging import actmat as command

import actmat
from actmat.errors import MergeError, RecipeError
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


def test_a_base_goes_first_by_position(pair: list[Path], tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    assert actmat.plan(tmp_path / "base", pair).output == "model"
    for function in (actmat.merge, actmat.plan, actmat.diagnose):
        assert list(inspect.signature(function).parameters)[:2] == ["base", "experts"]


def test_no_experts_are_refused(tmp_path: Path) -> None:
    for function in (actmat.plan, actmat.diagnose):
        with pytest.raises(RecipeError, match="expert"):
            function()
    with pytest.raises(RecipeError, match="expert"):
        actmat.merge(out=tmp_path / "out")


@pytest.mark.parametrize("with_base", [True, False], ids=["model", "adapter"])
@pytest.mark.parametrize("do", ["plan", "merge", "diagnose"])
def test_no_device_of_that_name(do: str, with_base: bool, pair: list[Path], tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    out: dict[str, Any] = {"out": tmp_path / "out"} if do == "merge" else {}
    base = tmp_path / "base" if with_base else None
    with pytest.raises(MergeError, match=r"device is 'cpu', .*; got 'nonsense': there is no kind"):
        getattr(actmat, do)(base, pair, device="nonsense", **out)
    flags = [*(["--base", str(base)] if base else []), *(x for e in pair for x in ("-e", str(e)))]
    found = command([do, *flags, *(f"--{k}={v}" for k, v in out.items()), "--device", "nonsense"])
    assert found.code == 1
    assert "got 'nonsense'" in " ".join(found.err.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a1", "a2", "base"]


def test_a_device_is_told_with_the_other_problems(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(MergeError) as error:
        actmat.merge(experts=pair, out=tmp_path / "out", device="nonsense", method="tise")
    assert "nonsense" in str(error.value)
    assert "tise" in str(error.value)
