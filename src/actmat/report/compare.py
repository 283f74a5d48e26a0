"""Two merges of the same experts, side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.diagnostics.model import REPORT_NAME, CheckResult, Diagnosis, read_diagnosis
from actmat.errors import CheckpointError, MergeError
from actmat.experts.resolve import open_adapter
from actmat.report.compare_inputs import matched_experts
from actmat.report.compare_tensors import TensorDifference, action_of, compare_modules, compare_stored
from actmat.report.manifest import read_manifest
from actmat.report.verify import input_place

__all__ = ["CheckDifference", "Comparison", "ResidualDifference", "SettingDifference", "compare"]

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
class Comparison:
    """What differs between two merges.

    Args:
        outs: the two outputs.
        methods: their rules.
        base: of both, as the first recipe writes it; None for adapters.
        experts: names of the experts, in the first and in the second.
        settings: what differs in recipes, versions and device.
        tensors: every tensor (of adapters, every module), in the order of the output; ties are left out.
        diagnosed: which of the two have a report.
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

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        """Tensors whose bytes differ, the furthest apart first: by relative distance, or by distance without a base."""
        found = [t for t in self.tensors if not t.same]
        known = all(t.relative is not None for t in found)
        return tuple(sorted(found, key=lambda t: -(t.relative or 0.0) if known else -t.distance))

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
        """Plain data, what `actmat compare --json` prints."""
        return {
            "format": FORMAT,
            "kind": "comparison",
            "outs": list(self.outs),
            "methods": list(self.methods),
            "base": self.base,
            "experts": [list(e) for e in self.experts],
            "settings": [{"field": s.field, "first": s.first, "second": s.second} for s in self.settings],
            "tensors": [t.to_json() for t in self.tensors],
            "relative": self.relative,
            "diagnosed": list(self.diagnosed),
            "residuals": [{"expert": r.expert, "first": r.first, "second": r.second} for r in self.residuals],
            "checks": [{"code": c.code, "title": c.title, "first": c.first, "second": c.second} for c in self.checks],
            "notes": list(self.notes),
        }


def compare(
    first: str | Path, second: str | Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Compare two outputs of `actmat merge`; memory is bounded whatever the size of a tensor.

    Args:
        first, second: directories of merged models, or of merged adapters.
        progress: called with the number of tensors compared so far, and of all.

    Raises:
        CheckpointError: no manifest, or an output that cannot be read.
        AlignmentError: no merges of the same base and experts; lists every difference.
    """
    places = Path(first), Path(second)
    manifests = read_manifest(places[0]), read_manifest(places[1])
    names = str(first), str(second)
    experts = matched_experts(*manifests, names)
    notes: list[str] = []
    if manifests[0].get("kind") == "adapter":
        tensors = _modules(places, manifests, progress)
    else:
        tensors = _tensors(places, manifests, notes, progress)
    reports = [read_diagnosis(p) if (p / REPORT_NAME).is_file() else None for p in places]
    residuals, checks = _judgements(reports, experts)
    missing = [n for n, r in zip(names, reports, strict=True) if r is None]
    if missing:
        notes.append(f"no {REPORT_NAME} in {' and '.join(missing)}: residuals and checks are not compared")
    base = manifests[0]["base"]
    return Comparison(
        outs=names,
        methods=(_method(manifests[0]), _method(manifests[1])),
        base=None if base is None else base["location"],
        experts=tuple(experts),
        settings=tuple(_settings(*manifests, experts)),
        tensors=tuple(tensors),
        diagnosed=(reports[0] is not None, reports[1] is not None),
        residuals=residuals,
        checks=checks,
        notes=tuple(notes),
    )


def _method(manifest: Mapping[str, Any]) -> str:
    return str(manifest["recipe"].get("method", "actmat"))


def _tensors(
    places: tuple[Path, Path],
    manifests: Sequence[Mapping[str, Any]],
    notes: list[str],
    progress: Callable[[int, int], None],
) -> list[TensorDifference]:
    first, second = ({r["name"]: r for r in m["tensors"]} for m in manifests)
    out = []
    with open_checkpoint(places[0]) as one, open_checkpoint(places[1]) as two, _base(manifests, places, notes) as base:
        _complete(((one, first), (two, second)))
        for name, row in first.items():
            other = second[name]
            if row["action"] == other["action"] == "tie":
                continue
            # another dtype never has the same bytes, but small integers and zeros may agree by chance
            same = row["hash"] == other["hash"] and one.specs[name].dtype == two.specs[name].dtype
            actions = action_of(row), action_of(other)
            out.append(compare_stored(one, two, base, name, actions, same=same))
            progress(len(out), len(first))
    return out


def _complete(sides: Sequence[tuple[Checkpoint, Mapping[str, Mapping[str, Any]]]]) -> None:
    problems = [
        f"{c.location} has no tensor '{n}' of shape {r['shape']}, which its manifest lists"
        for c, rows in sides
        for n, r in rows.items()
        if n not in c.specs or list(c.specs[n].shape) != r["shape"]
    ]
    if problems:
        raise CheckpointError("An output is not what its manifest says; actmat verify tells more.", problems)


@contextlib.contextmanager
def _base(
    manifests: Sequence[Mapping[str, Any]], places: Sequence[Path], notes: list[str]
) -> Iterator[Checkpoint | None]:
    """The base, where one of the two merges can still find it unchanged in names and shapes; None with a note else."""
    why = []
    for manifest, place in zip(manifests, places, strict=True):
        location = input_place(manifest["base"], place)
        try:
            opened = open_checkpoint(location)
        except MergeError as error:
            why.append(error.problems[0])
            continue
        with opened:
            shapes = {r["name"]: tuple(r["shape"]) for r in manifest["tensors"]}
            if all(n in opened.specs and opened.specs[n].shape == s for n, s in shapes.items()):
                yield opened
                return
        why.append(f"{location} holds other tensors now")
    notes.append(f"the base was not read, so distances are not relative to deltas: {why[0]}")
    yield None


def _modules(
    places: tuple[Path, Path], manifests: Sequence[Mapping[str, Any]], progress: Callable[[int, int], None]
) -> list[TensorDifference]:
    """Modules of adapters by their factors, full tensors beside them by their entries (a base is not needed)."""
    first, second = ({r["name"]: r for r in m["modules"]} for m in manifests)
    out = []
    with open_adapter(places[0]) as one, open_adapter(places[1]) as two:
        for name, row in first.items():
            actions = action_of(row), action_of(second[name])
            if name in one.modules and name in two.modules:
                out.append(compare_modules(one, two, name, actions))
            else:
                stored = one.extras[name]
                found = compare_stored(one.weights, two.weights, None, stored, actions, same=False)
                out.append(dataclasses.replace(found, name=name))
            progress(len(out), len(first))
    return out


def _settings(
    first: Mapping[str, Any], second: Mapping[str, Any], experts: Sequence[tuple[str, str]]
) -> Iterator[SettingDifference]:
    """Recipes without places and names of inputs (their contents agree), then versions and device."""
    renamed = {b: a for a, b in experts}
    mine = _flat(first, {a: a for a, _ in experts})
    other = _flat(second, renamed)
    for field in dict.fromkeys([*mine, *other]):
        if mine.get(field) != other.get(field):
            yield SettingDifference(field, mine.get(field), other.get(field))


def _flat(manifest: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    recipe = dict(manifest["recipe"])
    listed = recipe.pop("experts", [])
    recipe.pop("base", None)
    out: dict[str, Any] = {"method": recipe.pop("method", "actmat")}
    for field, value in recipe.items():
        if isinstance(value, Mapping):
            out |= {f"{field}.{k}": v for k, v in value.items()}
        else:
            out[field] = value
    labels = [names[e["name"]] for e in manifest["experts"]]
    out["order of experts"] = ", ".join(labels)
    out |= {f"weight of {n}": e.get("weight", 1.0) for n, e in zip(labels, listed, strict=True)}
    out |= {f"version of {k}": v for k, v in manifest["versions"].items()}
    return out | {"device": manifest.get("device", "cpu")}


def _judgements(
    reports: Sequence[Diagnosis | None], experts: Sequence[tuple[str, str]]
) -> tuple[tuple[ResidualDifference, ...], tuple[CheckDifference, ...]]:
    first, second = reports
    if first is None or second is None:
        return (), ()
    one, two = ({s.name: s.residual for s in r.experts_summary} for r in (first, second))
    residuals = tuple(ResidualDifference(a, one[a], two[b]) for a, b in experts if a in one and b in two)
    mine, other = ({c.code: c for c in r.checks} for r in (first, second))
    codes = sorted(mine.keys() | other.keys())
    checks = tuple(
        CheckDifference(code, (mine.get(code) or other[code]).title, said[0], said[1])
        for code in codes
        if (said := (_said(mine.get(code)), _said(other.get(code))))[0] != said[1]
    )
    return residuals, checks


def _said(check: CheckResult | None) -> str | None:
    """`issue found, 3 tensors`, `clear`."""
    if check is None:
        return None
    if check.verdict != "found":
        return check.verdict.replace("_", " ")
    places = f", {check.count} tensor{'s' if check.count != 1 else ''}" if check.count else ""
    return f"{check.severity} found{places}"
