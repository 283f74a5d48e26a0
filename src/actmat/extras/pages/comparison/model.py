"""The result of a comparison: frozen, JSON-able."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from actmat.foreign import html_table, terminal
from actmat.planning.choose import depth_of
from actmat.report.totals import Norms
from actmat.report.words import SIZE_CODES, size_finding, size_ratios

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A field of the recipe, the machine or the version that differs; None: at its default, or not there."""

    field: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class ResidualDifference:
    """The residual of one expert in both merges, over all measured matrices."""

    expert: str
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class CheckDifference:
    """A check with another verdict, or another number of tensors; None: that report does not have it."""

    code: str
    title: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor (of adapters, one module) of both outputs.

    Args:
        name, shape: of the tensor.
        actions: done to it in each merge; the method's name where one was used.
        same: both outputs stored the same values in the same dtype, or factors of the same delta.
        distance, relative, cosine: see `comparison.tensors`; the last two are None where a norm is zero or unknown.
        norms: of the merged deltas; None without the base.
        dtypes: in which the outputs store it, where these differ.
    """

    name: str
    shape: tuple[int, ...]
    actions: tuple[str, str]
    same: bool
    distance: float
    norms: tuple[float, float] | None = None
    relative: float | None = None
    cosine: float | None = None
    dtypes: tuple[str, str] | None = None

    @property
    def depth(self) -> int | None:
        """Number of its layer, if its name has one."""
        return depth_of(self.name)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Differences between two merges.

    Args:
        outs: the two outputs.
        methods: their methods.
        base: of both, as the first recipe writes it; None for adapters.
        experts: names of the experts, in the first and in the second.
        settings: fields of recipes, versions and device that differ.
        tensors: every tensor (of adapters, every module), in the order of the output, without ties.
        diagnosed: which of the two have a report.
        totals: norms of each merge, of its sum and of its experts, over what a method merged; None: not on record.
        residuals, checks: where both have one.
        notes: what could not be compared, and why.
    """

    outs: tuple[str, str]
    methods: tuple[str, str]
    base: str | None
    experts: tuple[tuple[str, str], ...]
    settings: tuple[SettingDifference, ...]
    tensors: tuple[TensorDifference, ...]
    diagnosed: tuple[bool, bool]
    residuals: tuple[ResidualDifference, ...] = ()
    checks: tuple[CheckDifference, ...] = ()
    notes: tuple[str, ...] = ()
    totals: tuple[Norms | None, Norms | None] = (None, None)

    def __repr__(self) -> str:
        first, second = self.names
        apart = "" if self.relative is None else f"; relative distance {self.relative:.3g}"
        counted = f"{len(self.differing)} of {len(self.tensors)} tensors differ"
        return terminal(f"<Comparison: {first} and {second}; {counted}{apart}>")

    def _repr_html_(self) -> str:
        first, second = self.names
        settings = [(s.field, s.first, s.second) for s in self.settings]
        residuals = [(r.expert, f"{r.first:.3g}", f"{r.second:.3g}") for r in self.residuals]
        checks = [(f"{c.code} {c.title}", c.first or "-", c.second or "-") for c in self.checks]
        titles = ("differs in", "size of the change", "residual", "check")
        tables: Sequence[Sequence[Sequence[object]]] = (settings, self.size_rows, residuals, checks)
        return str(html_table(repr(self), (), ())) + "".join(
            str(html_table(title, ("", first, second), rows))
            for title, rows in zip(titles, tables, strict=True)
            if rows
        )

    @property
    def names(self) -> tuple[str, str]:
        """Names that tell the two apart: their methods, else the ends of their places, else their order."""
        ends = (PurePath(self.outs[0]).name, PurePath(self.outs[1]).name)
        for first, second in (self.methods, ends):
            if first != second:
                return first, second
        return "first", "second"

    @property
    def size_codes(self) -> tuple[str | None, str | None]:
        """Of each merge the check that finds its size far off; a residual says little then. None: none does."""
        verdicts = ([(c.code, c.first) for c in self.checks], [(c.code, c.second) for c in self.checks])
        by_check = ([code for code, v in side if code in SIZE_CODES and " found" in (v or "")] for side in verdicts)
        whole = (size_finding(norms) for norms in self.totals)
        first, second = (
            codes[0] if codes else found[0] if found else None for codes, found in zip(by_check, whole, strict=True)
        )
        return first, second

    @property
    def size_rows(self) -> list[list[str]]:
        """Distance of each merge from the base, in words for a table; empty where both are not on record."""
        words = {"a mean expert": "against one expert, on average", "the experts' sum": "against all experts added up"}
        first, second = map(size_ratios, self.totals)
        rows = [(text, first[what], second[what]) for what, text in words.items() if what in first and what in second]
        return [[text, f"{one:.3g} x", f"{two:.3g} x"] for text, one, two in rows]

    @property
    def sizes(self) -> tuple[float, float] | None:
        """Norms of both merged deltas over the tensors that differ; None where they are not known."""
        norms = [t.norms for t in self.tensors if not t.same]
        known = [n for n in norms if n is not None]
        if not known or len(known) < len(norms):
            return None
        first, second = (math.sqrt(math.fsum(n[side] ** 2 for n in known)) for side in (0, 1))
        return first, second

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        """Tensors that differ, the furthest apart first: by relative distance, or by distance without a base."""
        found = [t for t in self.tensors if not t.same]
        known = all(t.relative is not None for t in found)
        return tuple(sorted(found, key=lambda t: -(t.relative or 0.0) if known else -t.distance))

    @property
    def in_other_dtypes(self) -> int:
        """Number of differing tensors whose values are equal: only their dtypes differ."""
        return sum(t.dtypes is not None and t.distance == 0 for t in self.differing)

    @property
    def relative(self) -> float | None:
        """Distance of all differing tensors together, relative to their deltas; None where those are not known."""
        found = [(t.distance, t.norms) for t in self.differing if t.norms is not None]
        if not found or len(found) < len(self.differing):
            return None
        apart = math.sqrt(math.fsum(d * d for d, _ in found))
        sizes = [math.sqrt(math.fsum(n[side] ** 2 for _, n in found)) for side in (0, 1)]
        return 2 * apart / sum(sizes) if sum(sizes) else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `actmat compare --json` prints it."""
        fields = dataclasses.asdict(self)
        after = {name: fields.pop(name) for name in ("diagnosed", "residuals", "checks", "notes", "totals")}
        return {"format": FORMAT, "kind": "comparison", **fields, "relative": self.relative, **after}
