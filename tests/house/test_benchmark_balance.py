"""The plans of large models: shapes of the published models, one row per plan."""

from __future__ import annotations

import pytest
from benchmarks.balance import headers_plan, row_of
from benchmarks.model_shapes import HeadersOnly, parameters, shapes_of


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


def test_a_plan_of_an_8b_model_divides_until_one_tensor_is_longer_than_a_share() -> None:
    plan = headers_plan("llama-3.1-8b", "actmat_ridge")
    row = row_of(plan, "8b", "actmat_ridge", [2, 8, 4096])
    assert row["units"] == 291
    assert row["2"] > row["8"] > 0.9
    assert row["4096"] == pytest.approx(1 / (4096 * row["longest"]), abs=1e-3)
    assert row["tensor"] in plan.by_name
