"""`actmat.merge_matrices`: every rule on plain tensors, and errors that say what is missing."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.models import naive_actmat
from tests.tolerances import BF16_ROUNDING, F64_ORACLE, relative_error

import actmat
from actmat.errors import AlignmentError, NumericalError, RecipeError
from actmat.methods import MergeMethod, all_methods

GENERATOR = torch.Generator().manual_seed(2)
BASE = torch.randn(9, 7, generator=GENERATOR, dtype=torch.float64)
DELTAS = [torch.randn(9, 7, generator=GENERATOR, dtype=torch.float64) for _ in range(3)]
DATA_FREE = [m for m in all_methods() if not m.needs_statistics]


def experts_for(method: MergeMethod) -> list[torch.Tensor]:
    return DELTAS[: method.max_experts or len(DELTAS)]


def base_for(method: MergeMethod) -> torch.Tensor | None:
    return BASE if method.needs_base else None


@pytest.mark.parametrize("method", DATA_FREE, ids=lambda m: m.name)
def test_every_data_free_rule(method: MergeMethod) -> None:
    deltas = experts_for(method)
    before = [d.clone() for d in deltas]
    out = actmat.merge_matrices(method.name, deltas, base=base_for(method))
    assert out.shape == deltas[0].shape
    assert out.dtype == torch.float64
    assert torch.isfinite(out).all()
    assert out.any()
    assert all(torch.equal(d, b) for d, b in zip(deltas, before, strict=True)), "inputs are left alone"
    assert torch.equal(out, actmat.merge_matrices(method.name, deltas, base=base_for(method)))


@pytest.mark.parametrize("method", DATA_FREE, ids=lambda m: m.name)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: torch.dtype, method: MergeMethod) -> None:
    deltas = [d.to(kind) for d in experts_for(method)]
    base = base_for(method)
    out = actmat.merge_matrices(method.name, deltas, base=None if base is None else base.to(kind))
    wide = actmat.merge_matrices(
        method.name, [d.float() for d in deltas], base=None if base is None else base.to(kind).float()
    )
    assert out.dtype == kind
    assert torch.equal(out, wide.to(kind))
    assert relative_error(out, wide) < BF16_ROUNDING


def surveys(method: MergeMethod) -> bool:
    """Whether the rule, as it comes, has thresholds over the whole model: here, over the whole batch."""
    return method.survey is not None and method.survey.applies(method.resolve_options({}))


@pytest.mark.parametrize(
    "method", [m for m in DATA_FREE if m.acts_on == "matrix" and not surveys(m)], ids=lambda m: m.name
)
def test_batch_axes_are_matrices_apart(method: MergeMethod) -> None:
    stacks = [torch.stack([d, 2 * d.flip(0)]).reshape(2, 1, 9, 7) for d in experts_for(method)]
    base = base_for(method)
    bases = None if base is None else torch.stack([base, base.flip(0)]).reshape(2, 1, 9, 7)
    out = actmat.merge_matrices(method.name, stacks, base=bases)
    for k in range(2):
        one = actmat.merge_matrices(method.name, [s[k, 0] for s in stacks], base=None if bases is None else bases[k, 0])
        assert relative_error(out[k, 0], one) < F64_ORACLE


def test_actmat_is_the_formula() -> None:
    out = actmat.merge_matrices("actmat", DELTAS)
    assert relative_error(out, naive_actmat(DELTAS)) < F64_ORACLE
    cut = actmat.merge_matrices("actmat", DELTAS, rtol=0.3)
    assert relative_error(cut, out) > 0.01


def test_weights_are_taken_where_the_rule_takes_them() -> None:
    out = actmat.merge_matrices("average", DELTAS, weights=[1.0, 0.0, 0.0])
    assert relative_error(out, DELTAS[0]) < F64_ORACLE
    for method in (m for m in DATA_FREE if not m.is_weighted):
        with pytest.raises(RecipeError, match=f"'{method.name}' makes no use of weights"):
            actmat.merge_matrices(
                method.name, experts_for(method), base=base_for(method), weights=[1.0] * len(experts_for(method))
            )


def test_random_rules_follow_their_generator() -> None:
    def drawn(seed: int) -> torch.Tensor:
        return actmat.merge_matrices("dare", DELTAS, generator=torch.Generator().manual_seed(seed), density=0.5)

    assert torch.equal(drawn(4), drawn(4))
    assert not torch.equal(drawn(4), drawn(5))
    state = torch.get_rng_state()
    actmat.merge_matrices("dare", DELTAS)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"


@pytest.mark.parametrize("method", [m for m in all_methods() if m.needs_statistics], ids=lambda m: m.name)
def test_missing_statistics_are_named(method: MergeMethod) -> None:
    with pytest.raises(RecipeError, match=f"'{method.name}' needs statistics .*{method.needs_statistics[0]}"):
        actmat.merge_matrices(method.name, DELTAS, base=base_for(method))


def test_statistics_are_used() -> None:
    method = next(m for m in all_methods() if m.needs_statistics == ("fisher",))
    one = [torch.ones_like(DELTAS[0]), torch.zeros_like(DELTAS[0]), torch.zeros_like(DELTAS[0])]
    out = actmat.merge_matrices(method.name, DELTAS, statistics={"fisher": one})
    assert relative_error(out, DELTAS[0]) < 1e-3


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(RecipeError, match="actmat"):
        actmat.merge_matrices("actmatt", DELTAS)
    with pytest.raises(RecipeError) as caught:
        actmat.merge_matrices("actmat", DELTAS, rtoll=1e-3)
    assert "rtol" in caught.value.problems[0]
    with pytest.raises(RecipeError) as caught:
        actmat.merge_matrices("actmat", DELTAS, rtol=2.0)
    assert "must lie in" in caught.value.problems[0]
    with pytest.raises(RecipeError, match="no deltas"):
        actmat.merge_matrices("average", [])
    with pytest.raises(AlignmentError, match="one shape"):
        actmat.merge_matrices("average", [DELTAS[0], DELTAS[1].T])
    with pytest.raises(AlignmentError, match="merges matrices"):
        actmat.merge_matrices("actmat", [torch.ones(3), torch.ones(3)])


@pytest.mark.parametrize("method", [m for m in DATA_FREE if not m.needs_base], ids=lambda m: m.name)
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_base_that_is_not_read_changes_nothing(kind: torch.dtype, method: MergeMethod) -> None:
    """A loop over methods passes the base to all of them."""
    deltas = [d.to(kind) for d in experts_for(method)]
    assert torch.equal(
        actmat.merge_matrices(method.name, deltas, base=BASE.to(kind)), actmat.merge_matrices(method.name, deltas)
    )


def test_a_missing_base_is_named() -> None:
    """Of the rules that look at `W_0`, some can do without: theirs is an optional argument."""
    for method in (m for m in all_methods() if m.needs_base and not m.needs_statistics):
        if not method.uses_base(method.resolve_options({})):
            assert actmat.merge_matrices(method.name, experts_for(method)).any()
        else:
            with pytest.raises(RecipeError, match=f"'{method.name}' looks at the base weights"):
                actmat.merge_matrices(method.name, experts_for(method))


def test_what_is_not_finite_is_an_error() -> None:
    """Of the result, in the dtype of the deltas, and of the deltas."""
    with pytest.raises(NumericalError, match="gave NaN or Inf for finite deltas"):
        actmat.merge_matrices("task_arithmetic", [d.float() * 1e38 for d in DELTAS])
    with pytest.raises(NumericalError, match="beyond float16's range"):
        actmat.merge_matrices("task_arithmetic", [d.half() * 2e4 for d in DELTAS], scaling=2.0)
    with pytest.raises(NumericalError, match="expert 1"):
        actmat.merge_matrices("average", [DELTAS[0], DELTAS[1] / 0])
    big = actmat.merge_matrices("average", [torch.full((2, 2), 3e38), torch.zeros(2, 2)])
    assert big.isfinite().all(), "an overflowing sum of finite entries is none"


@pytest.mark.parametrize("method", DATA_FREE, ids=lambda m: m.name)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 3, 4)])
def test_matrices_without_entries(shape: tuple[int, ...], method: MergeMethod) -> None:
    deltas = [torch.empty(shape) for _ in experts_for(method)]
    base = torch.empty(shape) if method.needs_base else None
    assert actmat.merge_matrices(method.name, deltas, base=base).shape == shape
