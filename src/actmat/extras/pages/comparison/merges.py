"""Compare two merges of the same experts: inputs, recipes, weights, answers kept."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, torch_dtype
from actmat.diagnostics.model import REPORT_NAME, read_diagnosis
from actmat.errors import AlignmentError, CheckpointError, MergeError, first_of
from actmat.experts.locate import locate, require_model, stored_of
from actmat.experts.lora.adapter import Adapter
from actmat.extras.pages.comparison import model
from actmat.linalg.lowrank import LowRank, frobenius_norm, weighted_sum
from actmat.report.manifest import expert_hashes, input_location, read_manifest

Manifest = Mapping[str, Any]


def matched_experts(first: Manifest, second: Manifest, names: tuple[str, str]) -> list[tuple[str, str]]:
    """Pair the names of equal experts in both merges, in the order of the first.

    Experts are equal if all tensors read by both merges have equal hashes; names may differ. If no tensor was read
    by both, name and location decide.

    Args:
        first, second: manifests.
        names: names of the two merges, for errors.

    Raises:
        AlignmentError: base, experts or kind of output differ; lists all differences.
    """
    headline = f"{names[0]} and {names[1]} cannot be compared: they are not merges of the same base and experts."
    kinds = [m.get("kind", "model") for m in (first, second)]
    if kinds[0] != kinds[1]:
        raise AlignmentError(headline, [f"{n} is a merged {k}" for n, k in zip(names, kinds, strict=True)])
    if first["hash"] != second["hash"]:
        hashes = f"{names[0]} has {first['hash']}, {names[1]} has {second['hash']}"
        raise AlignmentError(headline, [f"the inputs have hashes of different kinds: {hashes}; merge one again"])
    pairs, problems = _matched(first, second, names)
    problems = [*_base_problems(first, second, names), *problems, *_item_problems(first, second, names)]
    if problems:
        raise AlignmentError(headline, problems)
    return pairs


def _matched(first: Manifest, second: Manifest, names: tuple[str, str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Pairs of names, and a problem per expert without a counterpart."""
    left = {e["name"]: e for e in second["experts"]}
    pairs: list[tuple[str, str]] = []
    problems = []
    for expert in first["experts"]:
        candidates = sorted(left.values(), key=lambda e: e["name"] != expert["name"])
        partner = next((e["name"] for e in candidates if _same(expert, e, first, second)), None)
        if partner is not None:
            pairs.append((expert["name"], partner))
            del left[partner]
        else:
            problems.append(f"expert '{expert['name']}' of {names[0]} {_reason(expert, first, second, names[1])}")
    problems += [f"expert '{n}' of {names[1]} is not in {names[0]}" for n in left if not _named(first, n)]
    return pairs, problems


def _named(manifest: Manifest, name: str) -> Mapping[str, Any] | None:
    return next((e for e in manifest["experts"] if e["name"] == name), None)


def _reason(expert: Mapping[str, Any], first: Manifest, second: Manifest, name: str) -> str:
    twin = _named(second, expert["name"])
    if twin is None:
        return f"is not in {name}, which has {', '.join(e['name'] for e in second['experts'])}"
    mine, other = expert_hashes(first, expert["name"]), expert_hashes(second, twin["name"])
    differing = _differing(mine, other)
    if not differing:
        return f"lies at {expert['location']}, that of {name} at {twin['location']}; no tensor was read by both"
    return f"differs from that of {name} in {len(differing)} of {len(mine)} tensors ({first_of(differing)})"


def _same(a: Mapping[str, Any], b: Mapping[str, Any], first: Manifest, second: Manifest) -> bool:
    mine, other = expert_hashes(first, a["name"]), expert_hashes(second, b["name"])
    if mine.keys() & other.keys():
        return not _differing(mine, other)
    return bool(a["name"] == b["name"] and a["location"] == b["location"])


def _differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names in both mappings with different values."""
    return [n for n in mine if n in other and mine[n] != other[n]]


def _base_problems(first: Manifest, second: Manifest, names: tuple[str, str]) -> list[str]:
    if first["base"] is None or second["base"] is None:
        return []  # adapters merged without a base
    mine, other = ({r["name"]: r["input_hashes"]["base"] for r in m["tensors"]} for m in (first, second))
    differing = _differing(mine, other)
    if not differing:
        return []
    locations = f"{first['base']['location']} in {names[0]}, {second['base']['location']} in {names[1]}"
    return [f"the base differs in {len(differing)} of {len(mine)} tensors ({first_of(differing)}): {locations}"]


def _item_problems(first: Manifest, second: Manifest, names: tuple[str, str]) -> list[str]:
    mine, other = ({n: tuple(r["shape"]) for n, r in items_of(m).items()} for m in (first, second))
    word = "module" if first.get("kind") == "adapter" else "tensor"

    def only(names: Collection[str], others: Collection[str], name: str) -> list[str]:
        missing = [n for n in names if n not in others]
        return [f"{len(missing)} {word}(s) are only in {name} ({first_of(missing)})"] if missing else []

    shapes = _differing(mine, other)
    said = [f"{len(shapes)} {word}(s) have different shapes ({first_of(shapes)})"] if shapes else []
    return [*only(mine, other, names[0]), *only(other, mine, names[1]), *said]


def items_of(manifest: Manifest) -> dict[str, Manifest]:
    """Name -> row of every item: tensors of a model, modules and full tensors of an adapter."""
    return {row["name"]: row for row in manifest["modules" if manifest.get("kind") == "adapter" else "tensors"]}


@dataclass(frozen=True, slots=True)
class OpenedMerge:
    """An opened output: manifest, items, stored tensors, and the adapter if it is one."""

    directory: Path
    manifest: Manifest
    items: Mapping[str, Manifest]
    tensors: Tensors
    adapter: Adapter | None = None

    def factors(self, item: str) -> LowRank | None:
        """The item's delta in float64; None unless it is stored as factors."""
        module = None if self.adapter is None else self.adapter.modules.get(item)
        return None if module is None or self.adapter is None else self.adapter.factors(module, torch.float64)

    def stored_name(self, item: str) -> str:
        """Stored name of an item without factors."""
        return item if self.adapter is None else self.adapter.extras.get(item, item)

    def shape(self, item: str) -> tuple[int, ...] | None:
        """Shape of the stored item; None if missing."""
        if self.adapter is not None and item in self.adapter.modules:
            return self.adapter.modules[item].shape
        spec = self.tensors.specs.get(self.stored_name(item))
        return None if spec is None else spec.shape

    def identity(self, item: str) -> tuple[str, str] | None:
        """Hash and dtype of the stored bytes; None if the manifest has no hash per item.

        The dtype is included because small integers and zeros can have equal bytes in two dtypes.
        """
        recorded, stored = self.items[item].get("hash"), self.tensors.specs.get(item)
        return None if recorded is None or stored is None else (recorded, stored.dtype)

    def action(self, item: str) -> str:
        """`copy`, `tie`, ..., or the name of the method used."""
        row = self.items[item]
        return str(row["method"] if row["action"] == "merge" else row["action"])

    def missing(self) -> list[str]:
        """Problems: items not stored in the shape of the manifest."""
        return [
            f"{self.tensors.location} has no tensor '{n}' of shape {row['shape']}, which its manifest lists"
            for n, row in self.items.items()
            if self.shape(n) != tuple(row["shape"])
        ]


@contextlib.contextmanager
def open_output(directory: Path, manifest: Manifest) -> Iterator[OpenedMerge]:
    """Open the output in `directory` with its manifest.

    Raises:
        CheckpointError: its files cannot be read.
    """
    with locate(directory) as output:
        adapter = output if isinstance(output, Adapter) else None
        yield OpenedMerge(directory, manifest, items_of(manifest), stored_of(output).tensors, adapter)


CHUNK = 1 << 20
"""Entries of a tensor in memory at once; times three inputs at most about 50 MB."""


@dataclass(slots=True)
class PairSums:
    """Sums of squares and products of `D_1 - D_2`, `D_1`, `D_2`; sums of single deltas are None without a base."""

    apart: float
    first: float | None = None
    second: float | None = None
    inner: float = 0.0


def stored_sums(first: Tensors, second: Tensors, base: Tensors | None, name: str) -> PairSums:
    """Sums over a stored tensor of any two dtypes; `base` holds it under the same name."""
    apart = norm_first = norm_second = inner = 0.0
    for start in range(0, first.specs[name].numel, CHUNK):
        w_first, w_second = (_chunk(c, name, start) for c in (first, second))
        apart += _square(w_first - w_second)
        if base is not None:
            w_base = _chunk(base, name, start)
            d_first, d_second = w_first - w_base, w_second - w_base
            norm_first += _square(d_first)
            norm_second += _square(d_second)
            inner += float(torch.dot(d_first, d_second))
    return PairSums(apart) if base is None else PairSums(apart, norm_first, norm_second, inner)


def factored_sums(first: LowRank, second: LowRank) -> PairSums:
    """Sums over two factored deltas, exactly; no delta is formed.

    >>> x = LowRank(torch.ones(2, 1), torch.ones(1, 3))
    >>> sums = factored_sums(x, LowRank(-x.b_OR, x.a_RI))
    >>> round(sums.apart, 6), round(sums.inner, 6)
    (24.0, -6.0)
    """
    if torch.equal(first.b_OR, second.b_OR) and torch.equal(first.a_RI, second.a_RI):
        square = frobenius_norm(first) ** 2
        return PairSums(0.0, square, square, square)  # avoids rounding of a difference
    # <b_1 a_1, b_2 a_2> = sum (b_1^T b_2) * (a_1 a_2^T), over batches too
    inner = float(((first.b_OR.mT @ second.b_OR) * (first.a_RI @ second.a_RI.mT)).sum())
    apart = frobenius_norm(weighted_sum((first, second), (1.0, -1.0)))
    return PairSums(apart**2, frobenius_norm(first) ** 2, frobenius_norm(second) ** 2, inner)


def difference(
    name: str,
    shape: tuple[int, ...],
    actions: tuple[str, str],
    sums: PairSums,
    dtypes: tuple[str, str] | None = None,
) -> model.TensorDifference:
    """Build the difference of two tensors from their sums; without norms it has only the distance.

    >>> difference("w", (2,), ("a", "b"), PairSums(4.0, 1.0, 1.0, -1.0)).relative
    2.0

    Args:
        name, shape, actions: fields of the tensor.
        sums: sums over its entries.
        dtypes: stored dtypes if they differ; the tensors are then different at any distance.
    """
    distance = math.sqrt(sums.apart)
    same = distance == 0 and dtypes is None
    if sums.first is None or sums.second is None:
        return model.TensorDifference(name, shape, actions, same=same, distance=distance, dtypes=dtypes)
    norms = math.sqrt(sums.first), math.sqrt(sums.second)
    product = norms[0] * norms[1]
    relative = 2 * distance / sum(norms) if sum(norms) else None
    cosine = max(-1.0, min(1.0, sums.inner / product)) if product else None
    return model.TensorDifference(name, shape, actions, same, distance, norms, relative, cosine, dtypes)


def _chunk(tensors: Tensors, name: str, start: int) -> Tensor:
    """At most `CHUNK` entries, starting at `start`, in float64."""
    spec = tensors.specs[name]
    count = min(CHUNK, spec.numel - start)
    buffer = bytearray(count * spec.itemsize)
    tensors.read_into(name, start * spec.itemsize, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch_dtype(spec.dtype)).double()


def _square(values: Tensor) -> float:
    return float(torch.dot(values, values))


ExpertNames = Sequence[tuple[str, str]]


def compare(
    first: str | Path, second: str | Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> model.MergeComparison:
    """Compare two outputs of `actmat merge`, models or adapters, in bounded memory.

    Args:
        progress: called with the number of compared tensors and the total number.

    Raises:
        CheckpointError: a manifest is missing, or an output cannot be read.
        AlignmentError: the merges have different bases or experts; lists every difference.
    """
    outs = str(first), str(second)
    manifests = read_manifest(Path(first)), read_manifest(Path(second))
    experts = matched_experts(*manifests, outs)
    notes: list[str] = []
    with open_output(Path(first), manifests[0]) as one, open_output(Path(second), manifests[1]) as two:
        tensors = _tensors(one, two, notes, progress)
    base, (kept_one, kept_two) = manifests[0]["base"], map(_answers, outs)
    return model.MergeComparison(
        outs=outs,
        methods=(_method_of(manifests[0]), _method_of(manifests[1])),
        base=None if base is None else base["location"],
        experts=tuple(experts),
        settings=tuple(_setting_differences(*manifests, experts)),
        tensors=tuple(tensors),
        answers=tuple(
            model.Difference(a, kept_one[a], kept_two[b]) for a, b in experts if a in kept_one and b in kept_two
        ),
        notes=tuple(notes),
    )


def _answers(out: str) -> dict[str, float]:
    """Share of answers kept, by expert; empty if none were measured."""
    if not os.path.isfile(Path(out) / REPORT_NAME):
        return {}
    return {row.expert: row.kept / row.inputs for row in read_diagnosis(out).agreement or ()}


def _tensors(
    one: OpenedMerge, two: OpenedMerge, notes: list[str], progress: Callable[[int, int], None]
) -> list[model.TensorDifference]:
    """Differences of all items of the outputs, in the order of the first."""
    if problems := [*one.missing(), *two.missing()]:
        raise CheckpointError("An output differs from its manifest; 'actmat verify' lists the differences.", problems)
    differences = []
    with _opened_base((one, two), notes) as base:
        for name in one.items:
            if one.action(name) == two.action(name) == "tie":
                continue
            differences.append(_difference(one, two, base, name))
            progress(len(differences), len(one.items))
    return differences


def _difference(one: OpenedMerge, two: OpenedMerge, base: Tensors | None, name: str) -> model.TensorDifference:
    """Difference of one item: from equal hashes, else from factors if both have them, else from the bytes."""
    shape, actions = one.shape(name) or (), (one.action(name), two.action(name))
    if one.identity(name) is not None and one.identity(name) == two.identity(name):
        return model.TensorDifference(name, shape, actions, same=True, distance=0.0)
    factors = one.factors(name), two.factors(name)
    if factors[0] is not None and factors[1] is not None:
        return difference(name, shape, actions, factored_sums(factors[0], factors[1]))
    stored = one.stored_name(name)
    first, second = (o.tensors.specs[stored].dtype for o in (one, two))
    sums = stored_sums(one.tensors, two.tensors, base, stored)
    return difference(name, shape, actions, sums, None if first == second else (first, second))


@contextlib.contextmanager
def _opened_base(outputs: tuple[OpenedMerge, OpenedMerge], notes: list[str]) -> Iterator[Tensors | None]:
    """Open the base, if it still exists with the same names and shapes; else yield None and add a note.

    Merges without a base, those of adapters, yield None.
    """
    reasons = []
    for output in outputs:
        if output.manifest["base"] is None:
            continue
        location = input_location(output.manifest["base"], output.directory)
        try:
            opened = require_model(locate(location)).tensors
        except MergeError as error:
            reasons.append(error.problems[0])
            continue
        with opened:
            shapes = {n: tuple(row["shape"]) for n, row in output.items.items()}
            if all(n in opened.specs and opened.specs[n].shape == s for n, s in shapes.items()):
                yield opened
                return
        reasons.append(f"the tensors at {location} have changed")
    if reasons:
        notes.append(f"the base was not read, so distances are not relative to deltas: {reasons[0]}")
    yield None


def _method_of(manifest: Mapping[str, Any]) -> str:
    """Name of the merge's method."""
    return str(manifest["recipe"].get("method", "actmat"))


def _setting_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], experts: ExpertNames
) -> Iterator[model.Difference]:
    """Differing fields of recipes (without locations and names of inputs), versions and device."""
    mine = _flat(first, {a: a for a, _ in experts})
    other = _flat(second, {b: a for a, b in experts})
    for field in dict.fromkeys([*mine, *other]):
        if mine.get(field) != other.get(field):
            yield model.Difference(field, mine.get(field), other.get(field))


def _flat(manifest: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
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
