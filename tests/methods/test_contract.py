"""The contract: options read from a signature, and errors for values that do not fit."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
import torch
from torch import Tensor

from actmat.errors import RecipeError
from actmat.methods import Bounds, LowRankForm, Merged, MergeMethod, get_method
from actmat.methods.contract import Option


def rule(  # noqa: PLR0913 - one option of each type
    deltas: Sequence[Tensor],
    *,
    base: Tensor,
    generator: torch.Generator,
    weights: Sequence[float] | None = None,
    density: Annotated[float, Bounds(0, 1, open_low=True)] = 0.2,
    mode: Literal["mean", "sum"] = "mean",
    rtol: Annotated[float | None, Bounds(0)] = None,
    steps: Annotated[int, Bounds(1)] = 10,
    flag: bool = False,
    shares: list[float] | None = None,
) -> Merged:
    """A rule.

    Args:
        base: not an option.
        density: fraction
            of entries kept.
        mode: how to reduce.

    Raises:
        ValueError: never.
    """
    return Merged(deltas[0].clone())


RULE = MergeMethod("rule", rule, "matrix")


def test_options_come_from_the_signature_without_the_needs() -> None:
    assert list(RULE.options) == ["density", "mode", "rtol", "steps", "flag", "shares"]
    assert RULE.needs == {"base", "generator", "weights"}
    assert RULE.needs_base
    assert RULE.is_random
    assert RULE.is_weighted
    assert RULE.options["density"].doc == "fraction of entries kept."
    assert RULE.options["mode"].doc == "how to reduce."
    assert RULE.options["rtol"].doc == ""
    assert RULE.options["rtol"].bounds == Bounds(0)


def test_documentation_and_bounds_may_stand_in_the_annotation() -> None:
    def annotated(
        deltas: Sequence[Tensor], *, density: Annotated[float, Bounds(0, 1), "fraction of entries."] = 0.5
    ) -> Merged:
        return Merged(deltas[0].clone())

    option = MergeMethod("annotated", annotated, "matrix").options["density"]
    assert (option.type, option.bounds, option.doc) == (float, Bounds(0, 1), "fraction of entries.")


def test_the_low_rank_form_applies_as_declared() -> None:
    def merge_lowrank(deltas: Sequence[Any]) -> Any:
        raise AssertionError("what a method can do is not found out by calling it")

    def reason(options: Any, n_experts: int, weights: Sequence[float] | None) -> str | None:
        return f"{n_experts} are too many" if n_experts > 2 else None

    plain = dataclasses.replace(RULE, lowrank=LowRankForm(merge_lowrank))
    assert plain.why_dense({}, 3) is None
    limited = dataclasses.replace(RULE, lowrank=LowRankForm(merge_lowrank, why_not=reason))
    assert limited.why_dense({}, 2) is None
    assert limited.why_dense({}, 3) == "3 are too many"
    assert RULE.why_dense({}, 1) == "rule has no low-rank form"
    assert dataclasses.replace(RULE, acts_on="elementwise").why_dense({}, 1) == "rule acts on single entries"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("density", 1),
        ("density", 1e-9),
        ("rtol", None),
        ("rtol", 0.0),
        ("mode", "sum"),
        ("flag", True),
        ("shares", [1, 0.5]),
        ("shares", (1.0,)),
    ],
)
def test_values_that_fit(name: str, value: Any) -> None:
    assert RULE.resolve_options({name: value})[name] == value


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("density", 0.0, r"\(0, 1\]"),
        ("density", 1.5, "must lie in"),
        ("density", "0.5", "expects float"),
        ("density", True, "expects float"),
        ("rtol", -1e-9, r"\[0, inf\]"),
        ("mode", "median", '"mean" . "sum"'),
        ("steps", 2.0, "expects int"),
        ("steps", True, "expects int"),
        ("steps", 0, "must lie in"),
        ("flag", 1, "expects bool"),
        ("shares", [1.0, "x"], "shares"),
        ("shares", 1.0, "shares"),
    ],
)
def test_values_that_do_not(name: str, value: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        RULE.resolve_options({name: value})


def test_a_misspelt_option_is_an_error_that_offers_the_near_name() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'density'") as raised:
        RULE.resolve_options({"desnity": 0.5})
    assert "Its options: density, mode" in str(raised.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(RecipeError) as raised:
        RULE.resolve_options({"desnity": 0.5, "steps": 0, "mode": "x"})
    assert len(raised.value.problems) == 3


def test_a_merge_function_with_kwargs_or_an_option_without_default_is_refused() -> None:
    def swallows(deltas: Sequence[Tensor], **options: Any) -> Merged:
        return Merged(deltas[0])

    def lacks(deltas: Sequence[Tensor], *, density: float) -> Merged:
        return Merged(deltas[0])

    with pytest.raises(TypeError, match="kwargs"):
        MergeMethod("swallows", swallows, "matrix")
    with pytest.raises(TypeError, match="'density' has no default"):
        MergeMethod("lacks", lacks, "matrix")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("acts_on", "matrices", "expects 'matrix', 'tensor', 'elementwise', got 'matrices'"),
        ("laws", frozenset({"linear"}), "expects 'permutation', .* got 'linear'"),
    ],
)
def test_a_declaration_with_an_unknown_law_or_kind_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said.replace("|", r"\|")):
        dataclasses.replace(RULE, **{field: value})


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_options_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(RecipeError, match=r"'density' must (be finite|lie in .*), got"):
        get_method("ties").resolve_options({"density": value})
    with pytest.raises(RecipeError, match=r"'rtol' must (be finite|lie in .*), got"):
        get_method("actmat").resolve_options({"rtol": value})
    unbounded = Option("limit", float, float("inf"), None, "")
    assert unbounded.problem(float("inf")) is None
    assert (unbounded.problem(value) is None) == (value == float("inf"))
