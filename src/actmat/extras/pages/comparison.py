"""Compare two merges of the same base and experts: recipes and weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, torch_dtype
from actmat.errors import AlignmentError, CheckpointError, first_of
from actmat.experts.locate import OpenInput, locate, require_model, stored_of
from actmat.experts.lora.adapter import Adapter
from actmat.foreign import terminal
from actmat.linalg.lowrank import frobenius_norm, weighted_sum
from actmat.report.manifest import expert_hashes, input_location, read_manifest

CHUNK = 1 << 20
"""Entries of a tensor in memory at once; of three inputs in float64 at most about 50 MB."""

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A value in both merges, such as a recipe field. None: missing."""

    name: str
    first: Any
    second: Any

    @property
    def row(self) -> list[str]:
        """Name and both values as text."""
        return [self.name, *(_short(value) for value in (self.first, self.second))]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor (for adapters: a module) that differs.

    Args:
        name: of the tensor.
        distance: `||W_1 - W_2||`.
        norms: of the two merged deltas; of a tensor that an adapter stores in full, of the tensor.
    """

    name: str
    distance: float
    norms: tuple[float, float]

    @property
    def relative(self) -> float:
        """The distance relative to the mean norm, 0 to 2."""
        return 2 * self.distance / math.fsum(self.norms)


@dataclass(frozen=True, slots=True, repr=False)
class MergeComparison:
    """Differences between two merges.

    Args:
        outs: the two outputs.
        methods: their methods.
        base: the common base, as written in the first recipe; None for adapters.
        experts: names of the experts, in the first and in the second.
        settings: differing recipe fields, versions and device.
        compared: number of tensors (for adapters: modules).
        tensors: those that differ, the largest relative distance first.
    """

    outs: tuple[str, str]
    methods: tuple[str, str]
    base: str | None
    experts: tuple[tuple[str, str], ...]
    settings: tuple[Difference, ...]
    compared: int
    tensors: tuple[TensorDifference, ...]

    def __repr__(self) -> str:
        first, second = self.names
        counted = f"{len(self.tensors)} of {self.compared} tensors differ"
        return terminal(f"<MergeComparison: {first} and {second}; {counted}; relative distance {self.relative:.3g}>")

    @property
    def names(self) -> tuple[str, str]:
        """Distinct names of the two: their methods, else the last parts of their paths, else their order."""
        ends = (PurePath(self.outs[0]).name, PurePath(self.outs[1]).name)
        for first, second in (self.methods, ends):
            if first != second:
                return first, second
        return "first", "second"

    @property
    def relative(self) -> float:
        """Distance over all differing tensors, relative to the mean norm of their deltas; 0 without any."""
        total = math.fsum(math.hypot(*(t.norms[side] for t in self.tensors)) for side in (0, 1))
        return 2 * math.hypot(*(t.distance for t in self.tensors)) / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data as printed by `actmat compare --json`."""
        tensors = [dataclasses.asdict(t) | {"relative": t.relative} for t in self.tensors]
        return dataclasses.asdict(self) | {"tensors": tensors, "relative": self.relative, "names": list(self.names)}


def compare(
    first: str | Path, second: str | Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> MergeComparison:
    """Compare two outputs of `actmat merge`, models or adapters, in bounded memory.

    Args:
        progress: called with the number of compared tensors and the total number.

    Raises:
        CheckpointError: a manifest is missing, or an output or the base cannot be read.
        AlignmentError: the merges have different bases or experts; lists every difference.
    """
    outs = str(first), str(second)
    manifests = read_manifest(Path(first)), read_manifest(Path(second))
    experts = _matched_experts(*manifests, outs)
    base = manifests[0]["base"]
    rows, others = map(_items, manifests)
    names = [name for name, row in rows.items() if row["action"] != "tie"]
    tensors = []
    with locate(first) as one, locate(second) as two, contextlib.ExitStack() as stack:
        place = None if base is None or isinstance(one, Adapter) else input_location(base, Path(first))
        based = None if place is None else stack.enter_context(require_model(locate(place)).tensors)
        for done, name in enumerate(names, 1):
            progress(done, len(names))
            if rows[name].get("hash", "") == others[name].get("hash"):
                continue
            distance, *norms = _distances(one, two, based, name)
            if distance:
                tensors.append(TensorDifference(name, distance, (norms[0], norms[1])))
    return MergeComparison(
        outs=outs,
        methods=(_method_of(manifests[0]), _method_of(manifests[1])),
        base=None if base is None else base["location"],
        experts=tuple(experts),
        settings=tuple(_setting_differences(*manifests, dict(experts))),
        compared=len(names),
        tensors=tuple(sorted(tensors, key=lambda t: -t.relative)),
    )


def _matched_experts(first: Manifest, second: Manifest, outs: tuple[str, str]) -> list[tuple[str, str]]:
    """Pair the names of equal experts, in the order of the first: all tensors that both merges read have equal hashes.

    Raises:
        AlignmentError: base, experts, tensors or kind of output differ; lists all differences.
    """
    pairs, problems = [], []
    headline = f"{outs[0]} and {outs[1]} cannot be compared: they are not merges of the same base and experts."
    kinds = [m.get("kind", "model") for m in (first, second)]
    if kinds[0] != kinds[1]:
        raise AlignmentError(headline, [f"{out} is a merged {k}" for out, k in zip(outs, kinds, strict=True)])
    bases = [m["base"] for m in (first, second) if m["base"] is not None]
    if len({b["content"] for b in bases}) > 1:
        problems.append(f"the bases differ: {' and '.join(b['location'] for b in bases)}")
    left = [e["name"] for e in second["experts"]]
    for name in (e["name"] for e in first["experts"]):
        mine = expert_hashes(first, name)
        candidates = sorted(left, key=lambda other: other != name)
        partner = next((o for o in candidates if not _differing(mine, expert_hashes(second, o))), None)
        if partner is None:
            problems.append(f"expert '{name}' of {outs[0]} has no counterpart with equal tensors in {outs[1]}")
        else:
            pairs.append((name, partner))
            left.remove(partner)
    problems += [f"expert '{name}' of {outs[1]} has no counterpart with equal tensors in {outs[0]}" for name in left]
    shapes, others = ({n: tuple(r["shape"]) for n, r in _items(m).items()} for m in (first, second))
    if wrong := [n for n in {**shapes, **others} if shapes.get(n) != others.get(n)]:
        problems.append(f"{len(wrong)} tensors are not in both, or have different shapes ({first_of(wrong)})")
    if problems:
        raise AlignmentError(headline, problems)
    return pairs


def _differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names in both mappings with different values."""
    return [n for n in mine if n in other and mine[n] != other[n]]


def _items(manifest: Manifest) -> dict[str, Manifest]:
    """Name -> row of every item: tensors of a model, modules and full tensors of an adapter."""
    return {row["name"]: row for row in manifest["modules" if manifest.get("kind") == "adapter" else "tensors"]}


def _distances(first: OpenInput, second: OpenInput, base: Tensors | None, name: str) -> tuple[float, float, float]:
    """`||W_1 - W_2||`, `||D_1||` and `||D_2||` of one item; modules by their factors, which are not multiplied out."""
    if isinstance(first, Adapter) and isinstance(second, Adapter) and name in first.modules:
        one, two = (a.factors(a.modules[name], torch.float64) for a in (first, second))
        same = torch.equal(one.b_OR, two.b_OR) and torch.equal(one.a_RI, two.a_RI)  # else rounding would be a distance
        apart = 0.0 if same else frobenius_norm(weighted_sum((one, two), (1.0, -1.0)))
        return apart, frobenius_norm(one), frobenius_norm(two)
    stored = first.extras.get(name, name) if isinstance(first, Adapter) else name
    tensors = [stored_of(output).tensors for output in (first, second)]
    shapes = {t.find_spec(stored).shape for t in (*tensors, *([base] if base is not None else []))}
    if len(shapes) > 1:
        raise CheckpointError(
            f"tensor '{stored}' has the shapes {', '.join(map(str, shapes))} in the outputs and the base. Likely "
            "cause: a file changed after the merge. Fix: 'actmat verify' lists the changes."
        )
    apart = norm_one = norm_two = 0.0
    for start in range(0, tensors[0].specs[stored].numel, CHUNK):
        w_one, w_two = (_chunk(t, stored, start) for t in tensors)
        apart += _square(w_one - w_two)
        w_base = 0.0 if base is None else _chunk(base, stored, start)
        norm_one += _square(w_one - w_base)
        norm_two += _square(w_two - w_base)
    return math.sqrt(apart), math.sqrt(norm_one), math.sqrt(norm_two)


def _chunk(tensors: Tensors, name: str, start: int) -> Tensor:
    """At most `CHUNK` entries, starting at `start`, in float64."""
    spec = tensors.specs[name]
    count = min(CHUNK, spec.numel - start)
    buffer = bytearray(count * spec.itemsize)
    tensors.read_into(name, start * spec.itemsize, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch_dtype(spec.dtype)).double()


def _square(values: Tensor) -> float:
    return float(torch.dot(values, values))


def _method_of(manifest: Manifest) -> str:
    """Name of the merge's method."""
    return str(manifest["recipe"].get("method", "actmat"))


def _setting_differences(first: Manifest, second: Manifest, experts: Mapping[str, str]) -> Iterator[Difference]:
    """Differing fields of recipes (without locations and names of inputs), versions and device."""
    mine = _settings(first, {a: a for a in experts})
    other = _settings(second, {b: a for a, b in experts.items()})
    for field in dict.fromkeys([*mine, *other]):
        if mine.get(field) != other.get(field):
            yield Difference(field, mine.get(field), other.get(field))


def _settings(manifest: Manifest, names: Mapping[str, str]) -> dict[str, Any]:
    recipe = {k: v for k, v in manifest["recipe"].items() if k not in ("base", "experts", "method", "notes")}
    out: dict[str, Any] = {"method": _method_of(manifest)}
    for field, value in recipe.items():
        out |= {f"{field}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {field: value}
    labels = [names[e["name"]] for e in manifest["experts"]]
    listed = manifest["recipe"].get("experts", [])
    out["order of experts"] = ", ".join(labels)
    out |= {f"weight of {n}": e.get("weight", 1.0) for n, e in zip(labels, listed, strict=True)}
    out |= {f"version of {k}": v for k, v in manifest["versions"].items()}
    return out | {"device": manifest.get("device", "cpu")}


def _short(value: Any) -> str:
    if isinstance(value, float) and 0 < value < 1:
        return f"{value:.3g}"
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
