"""The paper's cost table (Table 6), whole: what each rule does before a merge, its operations, the one that dominates.

Operations are those of the rules as published, on `T` square `N x N` layers, in multiply-adds, by the paper's counting:
a product `N^3`, an inverse `2 N^3`, a singular value decomposition `22 N^3`, an operation on all entries `N^2`. Counted
so, the terms in `N^3` are the paper's; those in `N^2` differ by up to `T + 1`, for the reasons in
docs/analyses/cost.md, so both are kept. actmat itself does less where it can (`docs/numerics.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from actmat_experiments.harness.table import new_table

INVERSE, SVD = 2, 22
"""Of an `N x N` matrix, in units of `N^3`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """`per_expert T + fixed`."""

    per_expert: int
    fixed: int

    def at(self, n_experts: int) -> int:
        """The number for `T` experts."""
        return self.per_expert * n_experts + self.fixed

    def __str__(self) -> str:
        first = "" if not self.per_expert else "T" if self.per_expert == 1 else f"{self.per_expert}T"
        if not self.fixed:
            return first or "0"
        sign = ("-" if self.fixed < 0 else "+") if first else "-" if self.fixed < 0 else ""
        return f"{first} {sign} {abs(self.fixed)}" if first else f"{sign}{abs(self.fixed)}"


@dataclass(frozen=True, slots=True)
class RuleCost:
    """One row of the table.

    Args:
        preprocessing: what must be known beyond the checkpoints, and what that costs.
        products, inverses, svds: how many of `N x N`.
        entries: operations on all entries: deltas, sums, scales, the base added; counted on transcriptions.
        printed_entries: the same in the paper's formula.
        costly: the operation that dominates.
        printed_rest: what the paper's formula has below `N^2`.
    """

    method: str
    preprocessing: str
    products: Terms
    inverses: Terms
    svds: Terms
    entries: Terms
    printed_entries: Terms
    costly: str
    printed_rest: str = ""

    @property
    def cubic(self) -> Terms:
        """The factor of `N^3`."""
        parts = ((self.products, 1), (self.inverses, INVERSE), (self.svds, SVD))
        return Terms(sum(t.per_expert * f for t, f in parts), sum(t.fixed * f for t, f in parts))

    @property
    def leading(self) -> str:
        """The leading term of both formulas."""
        return self.counted.partition(" N^")[0] + (" N^3" if self.cubic != _NO else " N^2")

    def leading_count(self, n_experts: int, side: float) -> float:
        """The leading term for `T` layers of this side."""
        if self.cubic == _NO:
            return self.entries.at(n_experts) * side**2
        return self.cubic.at(n_experts) * side**3

    @property
    def counted(self) -> str:
        """All terms, as counted here."""
        return " + ".join(_term(t, p) for t, p in ((self.cubic, 3), (self.entries, 2)) if t != _NO)

    @property
    def printed(self) -> str:
        """All terms, as the paper prints them."""
        terms = ((self.cubic, 3), (self.printed_entries, 2))
        return " + ".join(_term(t, p) for t, p in terms if t != _NO) + self.printed_rest


def _term(terms: Terms, power: int) -> str:
    text = str(terms)
    return f"({text}) N^{power}" if " " in text else f"{text} N^{power}"


_NO, _ONE = Terms(0, 0), Terms(0, 1)
_GRAMS = "data of every task, forward passes of every expert; Grams: (2L - 1) T N^2 per layer, L tokens per expert"

RULES: tuple[RuleCost, ...] = (
    RuleCost("average", "none", _NO, _NO, _NO, Terms(1, 0), Terms(1, 0), "sum"),
    RuleCost(
        "task_arithmetic", "none; validation where lambda is tuned", _NO, _NO, _NO, Terms(2, 1), Terms(2, 1), "sum"
    ),
    RuleCost("regmean", _GRAMS, Terms(1, 1), _ONE, _NO, Terms(3, -1), Terms(2, -2), "inverse of the summed Gram"),
    RuleCost("actmat", "none", Terms(2, 1), _ONE, _NO, Terms(3, -1), Terms(3, -2), "inverse of the summed D^T D"),
    RuleCost("iso_c", "none", _ONE, _NO, _ONE, Terms(2, 1), Terms(2, 2), "SVD of the sum", " + N"),
    RuleCost("tsv", "none", _ONE, _NO, Terms(1, 2), Terms(1, 2), Terms(1, 3), "SVD of every delta"),
)
"""Rows in the order of the paper's Table 2, with task arithmetic."""


def rule_table() -> Table:
    """The rows, for the terminal."""
    caption = (
        "T experts, N x N layers; multiply-adds, with a product N^3, an inverse 2 N^3, an SVD 22 N^3;\n"
        "as published. N^2: as the paper prints it, and as counted on transcriptions of the rules.\n"
        "Grams: (2L - 1) T N^2 before the merge, L tokens per expert."
    )
    table = new_table("Operations by rule", caption, "rule", ("N^3", "N^2, paper", "N^2, here", "dominated by"))
    for rule in RULES:
        printed = f"{rule.printed_entries}{rule.printed_rest.replace(' ', ', ', 1)}"
        cells = (str(rule.cubic), printed, str(rule.entries), rule.costly)
        table.add_row(rule.method, *(f" {c}" for c in cells))
    return table
