"""Data-free estimates of a layer's input second moment from one delta: the first two axes of the family.

Every estimate is stored as a factor, `K_t = A_t^T A_t`, so that the squared matrix need not be formed.

Shapes: `O` out_features, `I` in_features, `N` entries, `R` rows of the factor (`R = O`, or `min(O, I)` for a power).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from actmat.linalg.lapack import Retries, economy_svd
from actmat.linalg.masks.trims import trim_to_top

__all__ = ["Estimator", "Normaliser"]

Normaliser = Literal["none", "norm"]


@dataclass(frozen=True, slots=True)
class Estimator:
    """The estimate `w_t K_t` of one delta `D_t`; the steps apply in this order.

    Args:
        trim: keep this fraction of the entries, those of largest magnitude (TACT); None keeps all.
        centre: subtract from each row the mean row (over `O`), as ACE does.
        power: `K_t = (A^T A)^power` in place of `A^T A`.
        normalise: `"norm"` multiplies by `1 / ||D_t||_F^2` of the full delta (WUDI); a zero delta gets weight 0.

    >>> import torch
    >>> Estimator(centre=True).factor(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))[0].tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """

    trim: float | None = None
    centre: bool = False
    power: float = 1.0
    normalise: Normaliser = "none"

    @property
    def is_plain(self) -> bool:
        """True if the factor is the delta itself."""
        return self.trim is None and not self.centre and self.power == 1.0

    def rows(self, out_features: int, in_features: int) -> int:
        """Rows `R` of the factor of an `O x I` delta."""
        return out_features if self.power == 1.0 else min(out_features, in_features)

    def factor(self, delta_OI: Tensor) -> tuple[Tensor, Retries]:
        """`A_t` with `K_t = A_t^T A_t`, and the retries of its decomposition; the delta itself if it is plain."""
        out = delta_OI if self.trim is None else trim_to_top(delta_OI, self.trim)
        if self.centre:
            out = out - out.mean(dim=-2, keepdim=True)
        return self.powered(out)

    def powered(self, factor_OI: Tensor) -> tuple[Tensor, Retries]:
        """`diag(s^power) V^T` for the factor `U diag(s) V^T`: its Gram is the power of the factor's Gram.

        By SVD, not through the Gram's eigenvalues: those carry an error `eps s_max^2`, whose root is `3e-4 s_max`
        in float32.
        """
        if self.power == 1.0:
            return factor_OI, ()
        svd = economy_svd(factor_OI)
        return svd.s_R.pow(self.power).unsqueeze(-1) * svd.vh_RN, svd.retries

    def weight(self, squared_norm: float) -> float:
        """The normaliser `w_t` of a delta with this squared Frobenius norm."""
        if self.normalise == "none":
            return 1.0
        return 1.0 / squared_norm if squared_norm > 0 else 0.0
