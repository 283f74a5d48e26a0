"""Check that an output equals its base plus the deltas of given experts: `W = round(W_0 + sum_t c_t D_t)`.

The sum is computed again in float64, from the inputs and the manifest, by code independent of the merge.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas
from actmat.experts.fitted import entries_of
from actmat.experts.locate import OpenInput, fit_expert, require_model, stored_of
from actmat.linalg.lowrank import LowRank
from actmat.planning.choose import Chooser
from actmat.recipe import Recipe, make_recipe
from actmat.report.verify import ManifestInputs
from actmat.report.words import plural

CHUNK = 1 << 20
"""Number of entries compared at a time, in float64."""
MORE_TERMS = 8
"""Allowed roundings per entry in the compute dtype, in addition to those of a product's terms."""
SUMS = "average, linear and task_arithmetic"


@dataclass(frozen=True, slots=True)
class AddedTensor:
    """Comparison of one tensor that an expert changes.

    Args:
        name, dtype: name and dtype of the output's tensor.
        differing: entries that differ from the float64 sum rounded to the dtype.
        units: largest deviation from the rounded sum, in units of the last place of the largest number in the sum, in
        the coarser of the output's and the compute dtype; `most`: its limit, 1 plus the rounding errors of the
        compute dtype if the output's is not coarser.
        error_norm, norm: norm of the rounding error in the written delta `W - W_0`, and of the delta.
    """

    name: str
    dtype: str
    differing: int
    units: float
    most: float
    error_norm: float
    norm: float

    @property
    def is_sum(self) -> bool:
        """True if it equals the sum up to rounding."""
        return self.units <= self.most

    @property
    def relative_error(self) -> float:
        """Norm of the written delta's error, relative to the delta."""
        return self.error_norm / self.norm if self.norm else 0.0


@dataclass(frozen=True, slots=True)
class Added:
    """Result of the comparison.

    Args:
        tensors: tensors changed by an expert.
        unchanged: number of tensors that correctly have the base's values.
        problems: tensors that differ, and parts that are not a sum of deltas.
    """

    tensors: tuple[AddedTensor, ...]
    unchanged: int
    problems: tuple[str, ...]

    @property
    def relative_error(self) -> float:
        """Error of all written deltas relative to the deltas, which is caused by rounding."""
        norm = math.hypot(*(t.norm for t in self.tensors))
        return math.hypot(*(t.error_norm for t in self.tensors)) / norm if norm else 0.0

    def lines(self) -> list[str]:
        """The result as lines of text."""
        if not self.tensors:
            return []
        exact = sum(t.differing == 0 for t in self.tensors)
        near = [t for t in self.tensors if t.differing and t.is_sum]
        counts = [f"{exact} of {plural(len(self.tensors), 'changed tensor')} to the bit"]
        if near:
            units = max(1.0, *(t.units for t in near))
            counts.append(f"{len(near)} off by at most {units:.2g} units of the last place")
        if others := len(self.tensors) - exact - len(near):
            counts.append(f"{others} not")
        lost = max(self.tensors, key=lambda t: t.relative_error)
        return [
            f"added: {', '.join(counts)}; {self.unchanged} as in the base",
            f"rounding to {', '.join(dict.fromkeys(t.dtype for t in self.tensors))}: relative error "
            f"{self.relative_error:.2g} of the delta, at most {lost.relative_error:.2g} ('{lost.name}')",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [{n: getattr(t, n) for n in (*t.__slots__, "relative_error")} for t in self.tensors]
        return {"tensors": rows, "unchanged": self.unchanged, "error": self.relative_error}


def check_added(merged: OpenInput, inputs: ManifestInputs, against: Sequence[OpenInput]) -> Added:
    """Compare a merged model with its base plus the deltas of `against`, in the manifest's order.

    Args:
        merged: the output.
        inputs: the inputs of its manifest.

    Raises:
        CheckpointError: the number of experts differs, an input cannot be opened, or the output is not such a sum.
    """
    manifest = inputs.manifest
    labels = [e["name"] for e in manifest["experts"]]
    _check_form(merged.location, manifest, len(against), labels)
    base = require_model(inputs.located("base"))
    with contextlib.ExitStack() as stack:
        experts = [stack.enter_context(fit_expert(located, base)) for located in against]
        comparison = _SumComparison(base.tensors, experts, stored_of(merged).tensors, make_recipe(manifest["recipe"]))
        rows = {row["name"]: row for row in manifest["tensors"]}
        for row in rows.values():
            comparison.compare(row["name"], rows[row.get("tied_to") or row["name"]], len(labels))
    return comparison.result()


def _check_form(location: str, manifest: Mapping[str, Any], given: int, labels: Sequence[str]) -> None:
    """Raise for outputs that are not a sum of a base and deltas.

    Raises:
        CheckpointError: the output is not such a sum; lists all reasons.
    """
    problems = []
    if manifest.get("kind") == "adapter" or manifest["base"] is None:
        problems.append("the output is an adapter, not a base with added deltas. Fix: merge with --base and --to model")
    if given != len(labels):
        problems.append(f"expected one --against for each of {', '.join(labels)}, in this order; found {given}")
    recipe = manifest["recipe"]
    if recipe.get("output", {}).get("vocabulary") is not None:
        problems.append("the merge aligned vocabularies, so rows of the output and of the base do not correspond")
    forms: Counter[str] = Counter()
    for row in manifest["tensors"]:
        forms.update([f"merged by {row['method']}" for _ in [0] if row.get("method") and _shares(row, given) is None])
        forms.update(f"with '{name}'" for name in ("post", "space") if row.get(name))
    problems += [f"{plural(n, 'tensor')} {how}" for how, n in forms.items()]
    if problems:
        raise CheckpointError(
            f"{location}: --against compares with W_0 + sum_t c_t D_t ({SUMS}; one expert by any method that adds it "
            "whole); this output is not such a sum.",
            problems,
        )


def _shares(row: Mapping[str, Any], n_experts: int) -> list[float] | None:
    """Coefficient of every expert's delta in a tensor of the manifest; None if it is not such a sum."""
    weights, options = row.get("weights") or [1.0] * n_experts, row["options"]
    scale = row["scale"]
    if row["method"] == "task_arithmetic":
        return [scale * options["scaling"] * w for w in weights]
    total = math.fsum(weights)
    if row["method"] not in ("average", "linear") or not options.get("normalize", True) or not total:
        return None
    return [scale * w / total for w in weights]


class _SumComparison:
    """Compares tensor by tensor; see `Added`."""

    def __init__(self, base: Tensors, experts: Sequence[Deltas], out: Tensors, recipe: Recipe) -> None:
        self._base, self._experts, self._out = base, experts, out
        self._chooser = Chooser(recipe)
        self._eps = torch.finfo(torch_dtype(recipe.compute_dtype)).eps
        self._tensors: list[AddedTensor] = []
        self._unchanged = 0
        self._problems: list[str] = []

    def result(self) -> Added:
        """The result of all comparisons."""
        return Added(tuple(self._tensors), self._unchanged, tuple(self._problems))

    def compare(self, name: str, row: Mapping[str, Any], n_experts: int) -> None:
        """Compare one output tensor; `row` is its manifest entry, or that of the tensor it is tied to."""
        if name not in self._out.specs or name not in self._base.specs:
            self._problems.append(f"tensor '{name}' of the manifest is missing in the base or in the output")
            return
        terms: list[tuple[Deltas, str, float]] = []
        if row.get("method"):
            shares = _shares(row, n_experts)
            assert shares is not None, "checked before"
            terms = list(zip(self._experts, row["sources"], shares, strict=True))
        elif self._chooser.keeps(name) is None and any(
            e.needs_base and name in e.specs and e.source(name).kind != "zero" for e in self._experts
        ):
            self._problems.append(f"tensor '{name}': an expert changes it, but the manifest records no change")
            return
        if lacking := [f"{e.location} has no '{s}'" for e, s, _ in terms if s not in e.specs]:
            self._problems.append(f"tensor '{name}': {', '.join(lacking)}. Likely cause: another expert was merged")
            return
        terms = [t for t in terms if t[0].source(t[1]).kind != "zero" and t[2]]
        if not terms or not self._out.specs[name].is_floating:
            self._compare_copy(name)
            return
        total = self._sum(name, terms)
        self._tensors.append(total)
        if not total.is_sum:
            self._problems.append(
                f"tensor '{name}' of the output is not W_0 + sum_t c_t D_t: {total.differing} entries differ, by up to "
                f"{total.units:.3g} units of the last place; rounding gives {total.most:.3g}"
            )

    def _compare_copy(self, name: str) -> None:
        size = self._base.specs[name].numel
        dtype = torch_dtype(self._out.specs[name].dtype)
        pairs = ((_entries(c, name, s, n) for c in (self._base, self._out)) for s, n in _cuts(size))
        if all(bytes(raw_bytes(w0.to(dtype))) == bytes(raw_bytes(w)) for w0, w in pairs):
            self._unchanged += 1
        else:
            self._problems.append(f"tensor '{name}' of the output differs from the base, but no expert changes it")

    def _sum(self, name: str, terms: Sequence[tuple[Deltas, str, float]]) -> AddedTensor:
        spec = self._out.specs[name]
        dtype = torch_dtype(spec.dtype)
        eps = max(self._eps, torch.finfo(dtype).eps)
        differing, units, error, norm = 0, 0.0, 0.0, 0.0
        for start, size in _cuts(spec.numel):
            base, written = (_entries(c, name, start, size).to(torch.float64) for c in (self._base, self._out))
            delta, largest = torch.zeros_like(base), torch.maximum(base.abs(), written.abs())
            for expert, source, share in terms:
                term, magnitude = _delta(expert, source, start, base)
                delta += share * term
                largest = torch.maximum(largest, abs(share) * magnitude)
            off = ((base + delta).to(dtype).to(torch.float64) - written).abs()
            unit = torch.ldexp(torch.full_like(largest, eps / 2), torch.frexp(largest).exponent)
            unit = unit.clamp_min(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
            differing += int((off != 0).sum())
            units = max(units, float((off / unit).nan_to_num(nan=math.inf).max()))
            error += float(((written - base) - delta).square().sum())
            norm += float(delta.square().sum())
        terms_of = max(e.source(s).rank for e, s, _ in terms) + len(terms) + MORE_TERMS
        most = 1 + terms_of * self._eps / eps
        return AddedTensor(name, spec.dtype, differing, units, most, math.sqrt(error), math.sqrt(norm))


def _cuts(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(CHUNK, numel - start)) for start in range(0, numel, CHUNK))


def _entries(source: Tensors | Deltas, name: str, start: int, size: int) -> Tensor:
    raw = torch.empty(size, dtype=torch_dtype(source.specs[name].dtype))
    source.read_into(name, start * raw.itemsize, raw_bytes(raw))
    return raw


def _delta(expert: Deltas, name: str, start: int, base: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of a delta in float64, and the largest magnitude of the summands that form them."""
    source, stop = expert.source(name), start + base.numel()
    if source.kind == "stored":
        whole = _entries(expert, name, start, base.numel()).to(torch.float64)
        return whole - base, whole.abs()
    delta = expert.dense(name, start, stop, torch.float64)
    if not source.rank:
        return delta, delta.abs()
    product = expert.factors(name, expert.specs[name].shape, torch.float64)
    return delta, entries_of(LowRank(product.b_OR.abs(), product.a_RI.abs()), start, stop)
