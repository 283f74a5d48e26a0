"""Method `knots`.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` directions of the joint basis, `P, Q` ranks of the common
bases of low-rank deltas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.extras.research.dare import drops
from actmat.extras.research.joint import JointBasis, joint_basis
from actmat.linalg.lapack import Retries, retry_stats
from actmat.linalg.lowrank import CommonBases, LowRank, common_bases
from actmat.linalg.masks.election import elect, election_workspace, masked_sum
from actmat.linalg.masks.mask import Trim
from actmat.linalg.masks.threshold import StreamedCut, kth_magnitudes, selection_workspace
from actmat.linalg.singular import SpectrumMean, isotropic, join_parts, orthogonalized_sum, slots_per_expert
from actmat.linalg.svd import RANK_RTOL, accuracy_of, svd_workspace, thin_svd
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import LowRankForm, Merged, MergedLowRank, MethodCost
from actmat.methods.ties import SURVEY, TrimSurvey, kept_entries

KnotsRule = Literal["ties", "task_arithmetic", "dare", "tsv", "iso_c"]
Order = Literal["official", "actmat"]
ELEMENTWISE = ("ties", "dare")
OFFICIAL_ATOL = 1e-5


def merge(  # noqa: PLR0913 - options of a method are parameters of its function
    deltas: Sequence[Tensor],
    *,
    survey: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    rule: KnotsRule = "ties",
    order: Order = "official",
    density: Annotated[float | None, Bounds(low=0, high=1)] = None,
    trim: Literal["global", "tensor"] = "global",
    atol: Annotated[float | None, Bounds(low=0)] = None,
    rtol: Fraction = RANK_RTOL,
    mean: SpectrumMean = "all",
) -> Merged:
    """Merge coordinates of the experts in one joint singular basis (KnOTS), by TIES or another rule.

        [D_1 .. D_T] = U diag(s) [V_1^T .. V_T^T];
        D* = U rule(diag(s) V_1^T, .., diag(s) V_T^T)

    Made for LoRA, whose deltas hardly share directions as they are.

    | order | merged by the inner method | result |
    |---|---|---|
    | `official` (the paper and its code) | `C_t = diag(s) V_t^T` | `D* = U rule(C_1, ..., C_T)` |
    | `actmat` (K-TSV and K-Iso-C of the ACTMat paper's code) | `V_t^T` | `D* = U diag(s) rule(V_1^T, ..., V_T^T)` |

    The coordinates are computed as `C_t = U^T D_t`, so no right singular vector is needed and a zero delta has
    coordinates that are exactly zero. With inner TIES each expert's threshold is that of all its coordinates in the
    whole model (`trim="global"`, as in the original), which a survey finds before the first tensor is merged. Votes
    that cancel exactly elect nothing: the original takes the majority sign of all coordinates, but the sign of a
    coordinate is that of its singular vector, which a LAPACK is free to choose.

    Args:
        survey: each expert's threshold over the whole model; without it, these deltas are the model.
        rule: `ties`, mean of the trimmed coordinates that agree in sign; `task_arithmetic`, sum; `dare`, sum of
            randomly dropped and rescaled coordinates; `tsv`, TSV-M; `iso_c`, Iso-C (mean over `min(O, I)` values).
        order: the coordinates carry the singular values (`official`) or do not (`actmat`).
        density: fraction of coordinates that `ties` (default 0.2) or `dare` (default 0.1) keeps.
        trim: rank coordinates over the whole model or within each tensor.
        atol: singular values `<= atol` are dropped; 1e-5 in the official order and 0 in the other unless given. The
            default drops none of a tensor all of whose singular values are so small.
        rtol: singular values at or below `rtol` times the largest one are dropped as well.
        mean: of the singular values in `rule="iso_c"`, see `iso_c`; the other rules ignore it.

    Source:
        G. Stoica, P. Ramesh, B. Ecsedi, L. Choshen, J. Hoffman, "Model merging with SVD to tie the KnOTS", ICLR 2025,
        arXiv:2410.19735.
    """
    basis, parts_RI = _dense_parts(deltas, order, atol, rtol)
    retries: Retries = basis.retries
    if rule in ELEMENTWISE:
        value_RI = _by_entry(parts_RI, basis.on_R, rule, density, trim, survey, generator)
    else:
        value_RI, repeats = _by_spectrum(parts_RI, rule, mean, min(deltas[0].shape[-2:]), accuracy_of(deltas[0]))
        retries += repeats
    dtype = deltas[0].dtype
    return Merged(_outer(basis, order).to(dtype) @ value_RI.to(dtype), _stats(basis, retries))


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    rule: KnotsRule,
    order: Order,
    atol: float | None,
    rtol: float,
    mean: SpectrumMean,
    **of_entries: Any,
) -> MergedLowRank:
    """The same merge from the cores `M_t = P^T D_t Q` of the common bases, exact, in float64.

    `[M_1 ... M_T] = U' diag(s) [..]` gives `U = P U'` and `C_t = (U'^T M_t) Q^T`. Inner methods that commute with
    rotations of the inputs act on `R x Q`; `ties` and `dare` act on the entries of `R x I`.
    """
    bases, basis, parts_RQ = _lowrank_parts(deltas, order, atol, rtol)
    retries: Retries = basis.retries
    if rule in ELEMENTWISE:
        parts_RI = [_expanded(part_RQ, bases, deltas[0]) for part_RQ in parts_RQ]
        value_RI = _by_entry(parts_RI, basis.on_R, rule, **of_entries).to(torch.float64)
    else:
        value_RQ, repeats = _by_spectrum(parts_RQ, rule, mean, min(deltas[0].shape[-2:]), torch.float64)
        value_RI, retries = bases.right.rows(value_RQ), retries + repeats
    value = LowRank(bases.left.times(_outer(basis, order)), value_RI)
    return MergedLowRank(value.to(deltas[0].b_OR.dtype), _stats(basis, retries))


def _dense_parts(
    deltas: Sequence[Tensor], order: Order, atol: float | None, rtol: float
) -> tuple[JointBasis, list[Tensor]]:
    cut = atol if atol is not None else OFFICIAL_ATOL if order == "official" else 0.0
    basis = joint_basis(deltas, atol=cut, rtol=rtol, atol_spares_small=atol is None)
    return basis, [basis.coordinates(d) if order == "official" else basis.whitened(d) for d in deltas]


def _lowrank_parts(
    deltas: Sequence[LowRank], order: Order, atol: float | None, rtol: float
) -> tuple[CommonBases, JointBasis, list[Tensor]]:
    bases = common_bases(deltas)
    return bases, *_dense_parts(bases.cores_PQ, order, atol, rtol)


def _expanded(part_RQ: Tensor, bases: CommonBases, like: LowRank) -> Tensor:
    """Coordinates over the inputs, `R x I`, rounded as in the dense merge."""
    return bases.right.rows(part_RQ).to(like.b_OR.dtype)


def _outer(basis: JointBasis, order: Order) -> Tensor:
    return basis.u_OR if order == "official" else basis.u_OR * basis.s_R.unsqueeze(-2)


def _by_entry(
    parts_RI: Sequence[Tensor],
    on_R: Tensor,
    rule: KnotsRule,
    density: float | None,
    trim: str,
    survey: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    share = _density(rule, density)
    if rule == "dare":
        if generator is None:
            raise ValueError('knots: rule="dare" draws random masks and needs a generator; give a seed')
        scale = 1 / share if share > 0 else 1.0
        return masked_sum(parts_RI, drops([share] * len(parts_RI), generator), [scale] * len(parts_RI))
    if survey is not None and trim == "global":
        cuts = list(survey)
    else:
        rank = _kept(share, parts_RI[0][on_R].numel())
        cuts = [kth_magnitudes([part_RI[on_R].reshape(-1)], [[rank]])[0][0].value for part_RI in parts_RI]
    ones = [1.0] * len(parts_RI)
    masks = [Trim.at(cut, parts_RI[0].dtype) for cut in cuts]
    return elect(parts_RI, masks, scales=ones, counts=ones, zero_sign="zero")


def _density(rule: KnotsRule, density: float | None) -> float:
    if density is not None:
        return density
    return 0.2 if rule == "ties" else 0.1


def _kept(density: float, total: int) -> int:
    return kept_entries(density, total, variant="original")


def _by_spectrum(
    parts_RI: Sequence[Tensor], rule: KnotsRule, mean: SpectrumMean, directions: int, accuracy: torch.dtype
) -> tuple[Tensor, Retries]:
    """Inner methods on whole coordinates; `directions` is `min(O, I)` of the layer, not of the coordinates."""
    if rule == "tsv":
        slots = slots_per_expert((directions, directions), len(parts_RI))
        triplets = [thin_svd(part, k=slots, accuracy=accuracy) for part in parts_RI]
        left, right, retries = orthogonalized_sum(*join_parts(triplets), accuracy=accuracy)
        retries += tuple(name for part in triplets for name in part.retries)
        return left @ right, retries
    total_RI = torch.stack(list(parts_RI)).sum(0)
    if rule == "iso_c":
        value_RI, polar = isotropic(total_RI, directions, mean=mean, accuracy=accuracy)
        return value_RI, polar.retries
    return total_RI, ()


def _stats(basis: JointBasis, retries: Retries) -> dict[str, float | int | str | bool]:
    rank = basis.on_R.sum(-1)
    return {"rank_min": int(rank.min()), "rank_max": int(rank.max()), **retry_stats(retries)}


def _is_surveyed(options: Mapping[str, Any]) -> bool:
    return bool(options["rule"] == "ties" and options["trim"] == "global")


def _start(n_experts: int, options: Mapping[str, Any]) -> TrimSurvey:
    rank = partial(_kept, _density(options["rule"], options["density"]))
    return TrimSurvey([StreamedCut(rank) for _ in range(n_experts)], wants_votes=False)


def _observe(state: TrimSurvey, deltas: Sequence[Tensor] | Sequence[LowRank], options: Mapping[str, Any]) -> None:
    """Pass the coordinates of a merge to the selections, without the padding of lower ranks."""
    order: Order = options["order"]
    atol, rtol = options["atol"], options["rtol"]
    factored = [d for d in deltas if isinstance(d, LowRank)]
    if factored:
        bases, basis, parts_RQ = _lowrank_parts(factored, order, atol, rtol)
        parts_RI = [_expanded(part_RQ, bases, factored[0]) for part_RQ in parts_RQ]
    else:
        basis, parts_RI = _dense_parts([d for d in deltas if isinstance(d, Tensor)], order, atol, rtol)
    for selection, part_RI in zip(state.selections, parts_RI, strict=True):
        selection.observe(part_RI[basis.on_R].reshape(-1))


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    rank = min(rows, n_experts * columns)
    # Coordinates of all experts; while merging, a few more of their size (one expert's kept rows and the result, or
    # triplets in float64).
    coordinates = n_experts * rank * columns
    inner = coordinates + 7 * rank * (rank + columns) + svd_workspace(rank, columns)
    matrix = max(inner + 2 * rows * (rank + columns), svd_workspace(rows, n_experts * columns))
    scratch = 0
    if options["rule"] in ELEMENTWISE:
        scratch = election_workspace(rank * columns, n_experts)
        if options["rule"] == "ties" and options["trim"] == "tensor":
            scratch = max(scratch, selection_workspace(rank * columns))
    return math.prod(batch) * matrix + scratch


KNOTS = MergeMethod(
    "knots",
    merge,
    "matrix",
    laws=frozenset({"permutation", "odd", "left_orthogonal", "zero_expert", "zeros"}),
    lowrank=LowRankForm(merge_lowrank, keeps_row_space=False),  # `ties` and `dare` select single coordinates
    cost=MethodCost(workspace=_workspace, products=lambda options: (4, 8)),
    survey=replace(
        SURVEY,
        applies=_is_surveyed,
        start=_start,
        observe=_observe,
        finish=lambda state: tuple(cut.value for cut in state.cuts),
    ),
)
