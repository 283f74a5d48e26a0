"""Method `actmat`."""

from __future__ import annotations

from typing import Annotated, Literal

from actmat.errors import RecipeError
from actmat.linalg.interference.rule import Estimator, Filter, FilterKind, InterferenceRule, Normalizer, Solver
from actmat.methods._shared.interference import SHARED_LAWS, FillOption, member
from actmat.methods.contract import Bounds


def rule(  # noqa: PLR0913 - options of a method are parameters of its function
    *,
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    solver: Solver = "auto",
    filter: FilterKind = "hard",
    ridge: Annotated[float, Bounds(0, open_low=True)] = 0.1,
    time: Annotated[float, Bounds(0, open_low=True)] = 10.0,
    null: FillOption = "zero",
    normalize: Normalizer = "none",
    trim: Annotated[float | None, Bounds(0, 1, open_low=True)] = None,
    center: bool = False,
    power: Annotated[float, Bounds(0, 2, open_low=True)] = 1.0,
    form: Literal["delta", "weight"] = "delta",
) -> InterferenceRule:
    """Least interference between experts, with each delta's own Gram matrix in place of its input statistics.

        D* = (sum_t w_t D_t K_t) (sum_t w_t K_t)^+,   K_t = D_t^T D_t

    The interference of `D` on expert `t` is `tr((D - D_t) C_t (D - D_t)^T)`, `C_t` the second moment of the layer's
    inputs. Fine-tuning writes it into the delta, so `K_t` takes its place, and no data is needed. `D*` is the minimizer
    of `sum_t w_t ||(D - D_t) D_t^T||_F^2` of least norm, up to the cut-off; the defaults are the paper's.

    Args:
        rtol: eigenvalues of `S = sum_t w_t K_t` up to `rtol` times the largest are cut; default `I * eps(float32)`.
        solver: "auto" takes the cheapest exact form; "eigh" decomposes `S`; "stacked" takes the SVD of the stacked
            deltas, which does not square the condition number; "dual" decomposes the matrix of their row products.
        filter: "hard" cut-off; "tikhonov" `l / (l + ridge m)`; "exponential" `1 - exp(-l time / m)`; "adaptive" keeps
            the participation number of the spectrum; `l` an eigenvalue of `S`, `m = tr(S) / I` their mean.
        ridge: relative ridge of the "tikhonov" filter, in units of `m`.
        time: stopping time of the "exponential" filter, in units of `1 / m`.
        normalize: "norm" weights `K_t` by `1 / ||D_t||_F^2` (0 for a zero delta).
        trim: estimate `K_t` from this fraction of the entries of `D_t`, the largest magnitudes.
        center: subtract the mean row from `D_t` in the estimate.
        power: `K_t = (D_t^T D_t)^power`.
        form: "delta" keeps the base in the directions that the filter drops. "weight", for study, is the paper's boxed
            formula `W* = (sum_t W_t K_t) (sum_t K_t)^+`, which needs the base and sets the weights there to zero.

    Raises:
        RecipeError: `form="weight"` with a fill, or with a filter that does not cut.
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.

    Source:
        M. G. Abdel Hameed et al., "Model Merging via Data-Free Covariance Estimation", 2026, arXiv:2604.01329.

    >>> from torch import tensor
    >>> ACTMAT.merge([tensor([[1.0, 0.0]]), tensor([[0.0, 2.0]])]).value.tolist()
    [[1.0, 2.0]]
    """
    if form == "weight" and not (null == "zero" and filter in ("hard", "adaptive")):
        raise RecipeError(
            f"actmat: form='weight' takes null='zero' and filter='hard' or 'adaptive'; got null='{null}' and "
            f"filter='{filter}'. It sets cut directions to zero, which leaves nothing to fill. Use form='delta'."
        )
    return InterferenceRule(
        estimator=Estimator(trim=trim, center=center, power=power, normalize=normalize),
        spectral=Filter(filter, rtol=rtol, ridge=ridge, time=time),
        null=null if form == "delta" else "minus_base",
        solver=solver,
    )


ACTMAT = member(
    "actmat",
    rule,
    laws=SHARED_LAWS
    | {"single", "identical", "left_orthogonal", "right_orthogonal", "orthogonal_rows_sum", "zero_expert"},
    base=lambda options: options["form"] == "weight",
)
