"""Operations by formula, times by clock."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.merging import actmat as run_cli

from actmat.errors import RecipeError
from actmat.methods import all_methods
from actmat_experiments.analyses import cost
from actmat_experiments.analyses.cost import PAPER


def test_all_methods_are_timed_on_all_shapes():
    ticks = []
    result = cost([(8, 8), (6, 12)], n_experts=3, repeats=1, on_method=lambda: ticks.append(1))
    assert len(result.costs) == len(ticks) == 2 * len(all_methods())
    assert {c.shape for c in result.costs} == {(8, 8), (6, 12)}
    assert all(c.seconds > 0 and c.products > 0 for c in result.costs)
    found = {c.method: c for c in result.costs if c.shape == (8, 8)}
    assert found["actmat"].paper == 9 * 8**3
    assert found["slerp"].declared == 8**2 / 2
    assert found["ties"].paper is None
    assert [t.row_count for t in result.tables()] == [len(PAPER), *[len(all_methods())] * 2], "operations, then times"
    data = result.to_json()
    assert data["settings"]["threads"] == torch.get_num_threads()
    assert set(data["rates"]) == {"8x8", "6x12"}


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ([], {}, "shapes with entries"),
        ([(0, 4)], {}, "shapes with entries"),
        ([(4, 4)], {"device": "tpu"}, "device is"),
        ([(4, 4)], {"methods": ["actmatt"]}, "actmat"),
    ],
)
def test_what_cannot_be_timed_is_refused(shapes, more, message):
    with pytest.raises(RecipeError, match=message):
        cost(shapes, **more)


def test_the_command(tmp_path):
    outcome = run_cli(["analyze", "cost", "--shape", "6x4", "-m", "average", "--repeats", "1", "--out", str(tmp_path)])
    assert outcome.code == 0
    assert "6x4, 7 experts" in outcome.out
    assert run_cli(["analyze", "cost", "--shape", "6", "--out", str(tmp_path / "b")]).code == 1
