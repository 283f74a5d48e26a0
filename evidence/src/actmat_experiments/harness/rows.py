"""Rows of the tables: every rule with its defaults, the authors' variants, and further ones on request."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments import paper
from actmat_experiments.core import MergeMethod, all_methods, get_method
from actmat_experiments.harness.merging import Candidate
from actmat_experiments.harness.results import REGIMES

_PAPER = tuple(Candidate(name, method, options) for name, (method, options) in paper.VARIANTS.items())
_PACKED = Candidate("regmean_packed", "regmean", fields={"rules": [{"match": paper.ATTENTION, "method": "average"}]})
"""RegMean where attention is packed and not split: no module is called with its inputs, so there are no statistics, and
its four matrices are averaged. The paper's ablation; the row `regmean` is the other arm."""

_VARIANTS = {
    "full": (*_PAPER, _PACKED),
    "lora": (
        *_PAPER,
        Candidate("iso_c_rank", "iso_c", {"mean": "rank"}),
        *(Candidate(name, method, options) for name, (method, options) in paper.LORA_VARIANTS.items()),
        _PACKED,
    ),
}
"""Rows in addition to every rule with its defaults: authors' variants, so that no figure of the paper stands next to
another rule; the ablation of packed attention; and Iso-C's mean over the rank."""

_NOT_COMPARED = {"adamerging": "without coefficients that were learned it is task arithmetic"}


POSTPROCESSED = (
    Candidate("average+isotropize", "average", fields={"post": ["isotropize"]}),
    Candidate("task_arithmetic+subspace_boosting", "task_arithmetic", fields={"post": ["subspace_boosting"]}),
    *(Candidate(f"{method}+kappa", method, fields={"post": ["kappa"]}) for method in ("actmat", "tsv", "dc_merge")),
)
"""Rows with a step of post-processing."""

SPACES = (
    *(Candidate(f"{method}@core", method, fields={"space": "core"}) for method in ("tsv", "ties", "iso_c")),
    *(Candidate(f"{method}@factors", method, fields={"space": "factors"}) for method in ("ties", "dare")),
    *(
        Candidate(f"{method}@pico", method, fields={"space": "pico"})
        for method in ("average", "task_arithmetic", "actmat", "tsv", "dc_merge", "cart")
    ),
)
"""Rows of adapters seen in another space."""

BY_EIGHT = Candidate("regmean:data=8", "regmean", {"prior": 4 / 8, "ridge": 0.001})
"""What `actmat merge --data` makes of eight inputs of each expert, of statistics of so many: `--set samples=8`. Run
only where a request names it."""


def more_rows(regime: str) -> tuple[Candidate, ...]:
    """Rows of a regime in addition to those compared by default: steps and spaces."""
    return (*POSTPROCESSED, *(SPACES if regime == "lora" else ()))


def _why_not(method: MergeMethod, n_experts: int, statistics: Sequence[str]) -> str | None:
    """Reason why the rule cannot merge that many experts with these kinds of statistics; None if it can."""
    if missing := [kind for kind in method.needs_statistics if kind not in statistics]:
        return f"needs statistics measured on data: {', '.join(missing)}"
    if method.max_experts is not None and n_experts > method.max_experts:
        return f"merges at most {method.max_experts} expert(s), not {n_experts}"
    return None


def candidates(
    wanted: Sequence[str] | None, regime: str, n_experts: int, statistics: Sequence[str] = ()
) -> tuple[list[Candidate], dict[str, str]]:
    """Rows to compare in a regime: every rule that can run and the regime's variants, or the wanted ones of
    these and of `more_rows`.

    Returns:
        The rows, and the reasons for those left out.

    Raises:
        RecipeError: a wanted row is unknown or cannot run here.
    """
    rules = [m.name for m in all_methods()]
    rows = [*(Candidate(n, n) for n in rules if n not in _NOT_COMPARED), *_VARIANTS[regime]]
    if wanted is not None:
        known = {*rules, BY_EIGHT.name, *(c.name for r in REGIMES for c in (*_VARIANTS[r], *more_rows(r)))}
        if unknown := [w for w in wanted if w not in known and ".py" not in w]:
            raise RecipeError(
                "Unknown methods.", [f"'{w}' is unknown.{did_you_mean(w, sorted(known))}" for w in unknown]
            )
        rows = [Candidate(w.rpartition(":")[2], w) for w in dict.fromkeys(wanted) if w in rules or ".py" in w]
        rows += [c for c in (*_VARIANTS[regime], *more_rows(regime), BY_EIGHT) if c.name in wanted]
    reasons = {c.name: _why_not(get_method(c.method), n_experts, statistics) for c in rows}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if wanted is not None and left_out:
        raise RecipeError(
            "Some methods cannot run here: all experts are merged at once, with the available statistics.",
            [f"'{name}' {reason}" for name, reason in left_out.items()],
        )
    rows = [c for c in rows if c.name not in left_out]
    return rows, left_out if wanted is not None else left_out | _NOT_COMPARED
