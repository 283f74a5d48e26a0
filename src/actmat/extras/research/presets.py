"""More presets of the interference family: each chooses estimator, filter, fill and options of `actmat`."""

from __future__ import annotations

from typing import Annotated, Literal

from actmat.linalg.interference.descent import Adam
from actmat.linalg.interference.rule import Estimator, Filter, InterferenceRule, Null
from actmat.methods import regmean
from actmat.methods._shared.interference import FillOption, RelativeCutoff, SolverOption, preset
from actmat.methods.actmat_ridge import Positive
from actmat.methods.contract import Bounds
from actmat.methods.facets import SUM_LAWS, Law

PER_NORM = Estimator(normalize="norm")
FROM_SUM: frozenset[Law] = SUM_LAWS | {"single", "orthogonal_rows_sum"}


def wudi(
    *,
    optimizer: Literal["closed", "adam"] = "closed",
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    null: Null = "sum",
    steps: Annotated[int, Bounds(0)] = 300,
    lr: Positive = 1e-5,
) -> InterferenceRule | Adam:
    """Least interference in each expert's own row space, every expert counted equally.

        D* = argmin_D sum_t w_t ||(D - D_t) D_t^T||_F^2 / ||D_t||_F^2

    A zero delta has no term. The objective is a least-squares problem with a closed form, the default here; the paper
    takes a fixed number of Adam steps from the sum of the deltas. Where the objective is flat (directions that no delta
    uses), the closed form takes `N`, the sum by default, as gradient descent from the sum would. Weights are
    non-negative; they multiply the expert's term and, in the fill, `D_t`.

    Args:
        optimizer: "closed" for the minimizer; "adam" for `steps` steps of Adam from the sum, as published. Adam's
            steps do not scale with the deltas: `lr` is in the units of the weights.
        rtol: relative cut-off of the closed form, as in `actmat`; default `I * eps(float32)`.
        null: fill `N` of the closed form: nothing, the sum, or the mean of the deltas.
        steps: number of Adam steps.
        lr: Adam's step size.

    Source:
        R. Cheng et al., "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via Task
        Vectors", ICML 2025, arXiv:2503.08099.
    """
    return Adam(steps, lr) if optimizer == "adam" else InterferenceRule(PER_NORM, Filter(rtol=rtol), null)


def swudi(
    *,
    filter: Literal["exponential", "tikhonov"] = "exponential",
    time: Positive = 300.0,
    ridge: Positive = 0.1,
    null: FillOption = "sum",
    solver: SolverOption = "auto",
) -> InterferenceRule:
    """WUDI solved softly: gradient flow from the sum of the deltas, stopped at a finite time.

        D* = N (I - V f V^T) + B V (f / l) V^T,   f = 1 - exp(-l t),
        N = sum_t w_t D_t

    `S = sum_t w_t D_t^T D_t / ||D_t||_F^2 = V diag(l) V^T`, `B = sum_t w_t D_t D_t^T D_t / ||D_t||_F^2`. WUDI's few
    Adam steps stop long before the minimizer, and do better for it; the exponential filter is that early stop in closed
    form. Weights are non-negative; they multiply `K_t` and, in the fill, `D_t`.

    Args:
        filter: "exponential" `f = 1 - exp(-l time)`, or "tikhonov" `f = l / (l + ridge tr(S) / I)`.
        time: stopping time, in units of the eigenvalues of `S`, whose trace is the number of experts that moved.
        ridge: relative ridge of the "tikhonov" filter, in units of the mean eigenvalue.

    Source:
        WalkerWorldPeace/MLLMerging, public code of SWUDI.
    """
    return InterferenceRule(PER_NORM, Filter(filter, ridge=ridge, time=time, time_is_absolute=True), null, solver)


def aswudi(*, rtol: RelativeCutoff = None, null: FillOption = "sum", solver: SolverOption = "auto") -> InterferenceRule:
    """WUDI solved in as many leading directions as the spectrum's participation number says.

        D* = N (I - P) + B S^+ P,   rank P = ceil((sum sqrt(l))^2 / sum l),
        N = sum_t w_t D_t

    `P` projects on the leading eigenvectors of `S = sum_t w_t D_t^T D_t / ||D_t||_F^2 = V diag(l) V^T`, and `B = sum_t
    w_t D_t D_t^T D_t / ||D_t||_F^2`. The participation number of the singular values is `I` for a flat spectrum, 1 for
    a spike. In all other directions the sum of the deltas stays. Weights are non-negative; they multiply `K_t` and, in
    the fill, `D_t`.

    Source:
        WalkerWorldPeace/MLLMerging, public code of ASWUDI.
    """
    return InterferenceRule(PER_NORM, Filter("adaptive", rtol=rtol), null, solver)


def lot(*, rtol: Annotated[float | None, Bounds(0, 1)] = None) -> InterferenceRule:
    """Least drift of each layer's features on the experts' data.

        D* = (sum_t w_t D_t X_t^T X_t) (sum_t w_t X_t^T X_t)^+
           = argmin_D sum_t w_t ||X_t (D - D_t)^T||_F^2

    For linear layers this is RegMean in the delta form, with plain Gram matrices: the statistics "gram" are `X_t^T
    X_t`, one `I x I` matrix per expert. Weights are non-negative; they multiply it.

    Args:
        rtol: relative cut-off in units of the eigenvalues of the summed Gram; default `I * eps(float32)`.

    Source:
        W. Sun et al., "Towards Minimizing Feature Drift in Model Merging: Layer-wise Task Vector Fusion for Adaptive
        Knowledge Integration", NeurIPS 2025.
    """
    return regmean.rule(rtol=rtol)


WUDI = preset(wudi, FROM_SUM | {"identical"})
SWUDI = preset(swudi, FROM_SUM)
ASWUDI = preset(aswudi, FROM_SUM)
LOT = preset(lot, regmean.REGMEAN.laws, of="regmean", has_grams=True)
