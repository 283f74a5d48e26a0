"""Order, names and weights of the checkpoints of one run."""

import math

import pytest
from tests.tolerances import F64_IDENTITY

from actmat.errors import RecipeError
from actmat.extras.averaging.recipe import distinct_names, in_order, trajectory_weights


@pytest.mark.parametrize("text", ["uniform", "linear", "ema:0.9", "ema:1", "wsd"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_weights_are_positive_and_sum_to_one(text: str, count: int) -> None:
    weights, _ = trajectory_weights(text, count)
    assert len(weights) == count
    assert min(weights) > 0
    assert abs(math.fsum(weights) - 1) < F64_IDENTITY


def test_listed_numbers_are_divided_by_their_sum() -> None:
    assert trajectory_weights("1,2, 1", 3)[0] == [0.25, 0.5, 0.25]
    assert trajectory_weights("1,-3", 2)[0] == [-0.5, 1.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.5,0.5,0.5", "one number per checkpoint, 2, found 3"),
        ("1,-1", "a sum other than 0"),
        ("nan,1", "finite"),
        ("ema", "ema:DECAY"),
        ("ema:0", "ema:DECAY"),
        ("ema:1.5", "ema:DECAY"),
        ("wsd:cubic", "uniform, linear"),
        ("uniform:2", "uniform, linear"),
        ("mean", "uniform, linear"),
    ],
)
def test_other_weights_are_refused(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        trajectory_weights(text, 2)


def test_steps_are_ordered_by_their_numbers() -> None:
    assert in_order(["s-10", "s-9", "s-100"]) == ["s-9", "s-10", "s-100"]
    assert in_order(["b/2", "a/10", "a/9"]) == ["a/9", "a/10", "b/2"]
    assert in_order(["step", "10", "2"]) == ["2", "10", "step"]


def test_names_are_the_part_of_the_path_that_tells_them_apart() -> None:
    assert distinct_names(["x/step-1/", "x/step-2/"]) == ["step-1", "step-2"]
    assert distinct_names(["run-a/last", "run-b/last"]) == ["run-a", "run-b"]
    assert distinct_names(["a/1/m", "a/2/m", "b/1/m"]) == ["a/1/m", "a/2/m", "b/1/m"]
