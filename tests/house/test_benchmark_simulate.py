"""The simulated plans: shapes of the published models, one row per plan; the interval of a ratio."""

from __future__ import annotations

import math

import pytest
from benchmarks.model_shapes import HeadersOnly, parameters, shapes_of
from benchmarks.predicted import interval
from benchmarks.simulate import headers_plan, row_of, runs_of
from tests.helpers.rates import rates_of


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("mixtral-8x22b", 140.62),
        ("deepseek-v3", 671.03),
    ],
)
def test_shapes_add_up_to_the_published_size(model: str, billions: float) -> None:
    assert parameters(shapes_of(model)) / 1e9 == pytest.approx(billions, abs=0.005)


def test_headers_have_no_data() -> None:
    with HeadersOnly("m", {"w": (2, 3)}) as checkpoint, pytest.raises(ValueError, match="no data"):
        checkpoint.read("w")


def test_a_plan_of_an_8b_model_is_simulated() -> None:
    plan = headers_plan("llama-3.1-8b", "actmat_ridge")
    runs = runs_of(plan, rates_of(cores=8), [2, 64, 4096])
    few, many, far = runs
    assert few["efficiency"] > many["efficiency"] > 0.9 > far["efficiency"]
    assert far["limited_by"].startswith("'lm_head.weight', which takes")
    row = row_of(plan, "8b", "actmat_ridge", runs)
    assert row["units"] == 291
    assert row["64"] == round(many["efficiency"], 3)
    assert row["limited_by"] == far["limited_by"]


def test_interval_of_ratios() -> None:
    mean, low, high = interval([1.0, math.e**2, math.e])
    assert mean == pytest.approx(math.e)
    assert low * high == pytest.approx(mean**2)
    assert math.log(high / mean) == pytest.approx(4.30 / math.sqrt(3))
