"""Operations by formula, times by clock."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.merging import actmat as run_cli

from actmat.errors import RecipeError
from actmat.methods import all_methods
from actmat_experiments.analyses import cost
from actmat_experiments.analyses.cost import PAPER_FLOPS, flop_count


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        ("T N^2", 3 * 16**2),
        ("(2T + 3) N^3", 9 * 16**3),
        ("(22T + 45) N^3", 111 * 16**3),
        ("2 T^2 N^3", 2 * 9 * 16**3),
        ("T N^2 log N", 3 * 16**2 * 4),
        ("23 N^3", 23 * 16**3),
        ("N + 2 (T + N)", 16 + 2 * 19),
    ],
)
def test_formulae(formula, wanted):
    assert flop_count(formula, 3, 16) == wanted


@pytest.mark.parametrize("formula", ["", "T +", "(T", "T)", "N ^", "x N", "T N^2 !", "+ T"])
def test_what_is_no_formula(formula):
    with pytest.raises(ValueError):
        flop_count(formula, 3, 16)


@pytest.mark.parametrize("name", [m.name for m in all_methods()])
def test_every_declared_formula_can_be_read(name):
    method = next(m for m in all_methods() if m.name == name)
    assert flop_count(method.cost.flops, 7, 1024) > 0


def test_the_papers_formulae_agree_with_the_declarations_in_their_leading_power():
    """Constants differ where the declaration counts a decomposition as one product."""
    for name, formula in PAPER_FLOPS.items():
        declared = next(m.cost.flops for m in all_methods() if m.name == name)
        ratios = [flop_count(formula, 7, n) / flop_count(declared, 7, n) for n in (100.0, 1000.0)]
        assert ratios[0] == pytest.approx(ratios[1]), name
        assert ratios[0] >= 1


def test_all_methods_are_timed_on_all_shapes():
    ticks = []
    result = cost([(8, 8), (6, 12)], n_experts=3, repeats=1, on_method=lambda: ticks.append(1))
    assert len(result.costs) == len(ticks) == 2 * len(all_methods())
    assert {c.shape for c in result.costs} == {(8, 8), (6, 12)}
    assert all(c.seconds > 0 and c.products > 0 for c in result.costs)
    found = {c.method: c for c in result.costs if c.shape == (8, 8)}
    assert found["actmat"].declared == found["actmat"].paper == 9 * 8**3
    assert found["slerp"].declared == 8**2
    assert found["ties"].paper is None
    assert [t.row_count for t in result.tables()] == [len(PAPER_FLOPS), *[len(all_methods())] * 2], (
        "operations, then times"
    )
    data = result.to_json()
    assert data["settings"]["threads"] == torch.get_num_threads()
    assert set(data["rates"]) == {"8x8", "6x12"}


@pytest.mark.parametrize("shapes", [[], [(0, 4)]])
def test_shapes_without_entries(shapes):
    with pytest.raises(RecipeError, match="shapes with entries"):
        cost(shapes)


def test_devices_and_methods_that_are_not_there():
    with pytest.raises(RecipeError, match="device is"):
        cost([(4, 4)], device="tpu")
    with pytest.raises(RecipeError, match="actmat"):
        cost([(4, 4)], methods=["actmatt"])


def test_the_command(tmp_path):
    outcome = run_cli(["analyze", "cost", "--shape", "6x4", "-m", "average", "--repeats", "1", "--out", str(tmp_path)])
    assert outcome.code == 0
    assert "6x4, 7 experts" in outcome.out
    assert run_cli(["analyze", "cost", "--shape", "6", "--out", str(tmp_path / "b")]).code == 1
