"""Add experts to a finished merge, or take some out: the recorded recipe with experts more or less.

Where the merge kept its sums (`keep_sums`), no earlier expert is read again. The bytes are those of a merge of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actmat.checkpoints.base import FileIdentity, TensorSpec
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import CheckpointError, RecipeError, did_you_mean
from actmat.experts.base import Source
from actmat.experts.remembered import KeptSum, KeptSums, RememberedExpert
from actmat.foreign import html_table
from actmat.inputs import Earlier
from actmat.planning.model import SUMS
from actmat.planning.sums import weights_of
from actmat.progress import Progress
from actmat.recipe import make_recipe
from actmat.report import read_manifest
from actmat.report.manifest import input_location
from actmat.run import MergeReport, run_recipes
from actmat.settings import RunSettings

__all__ = ["GrowthReport", "add_experts", "remove_experts"]


@dataclass(frozen=True)
class GrowthReport:
    """Result of adding or removing experts.

    Args:
        merged: the merge that was made.
        from_sums: the sums of the earlier merge stood for its experts, which were not read.
        why_read: reason why all experts were read, in words; empty where they were not.
    """

    merged: MergeReport
    from_sums: bool
    why_read: str = ""

    def __repr__(self) -> str:
        how = "earlier experts not read" if self.from_sums else "all experts read"
        return f"<GrowthReport: {how}; {self.merged!r}>"

    def _repr_html_(self) -> str:
        return str(html_table(repr(self), (), ())) + self.merged.plan._repr_html_()


def add_experts(
    out: str | Path,
    experts: Sequence[str | Path | Mapping[str, Any]],
    *,
    to: str | Path | None = None,
    settings: RunSettings | None = None,
    progress: Progress | None = None,
) -> GrowthReport:
    """Add experts, the last in order, to a finished merge.

    The output has the bytes of a merge of all. If the merge kept its sums (`keep_sums`), only the base, the sums and
    the new experts are read, and the earlier ones need not exist any more; otherwise all experts are read.

    Args:
        out: directory of the finished merge.
        experts: locations, or mappings with `path`, `name` and `weight`.
        to: directory of the new output; None: it replaces `out` when it is complete.
        settings: how to run; the sums are continued by threads on this machine.
        progress: receives callbacks.

    Raises:
        CheckpointError: no finished merge at `out`, or the sums or the base changed since.
        RecipeError: an expert has that name, or the sums are not those that the new merge wants.
        MergeError: whatever merging all would raise; `out` is as it was.
    """
    folder, manifest = _finished(out)
    fields = _recorded(manifest, folder)
    new = [dict(e) if isinstance(e, Mapping) else {"path": str(e)} for e in experts]
    if not new:
        raise RecipeError("No expert to add is given.")
    labels = make_recipe({**fields, "experts": new}).labels
    if twice := [n for n in labels if n in {e["name"] for e in manifest["experts"]}]:
        raise RecipeError(
            f"{folder} already holds an expert '{twice[0]}'. Give the new one another name: NAME={new[0]['path']}"
        )
    recipe = make_recipe({**fields, "experts": [*fields["experts"], *new], "out": str(to or folder)})
    settings = _replacing(settings, folder, to)
    if not recipe.keep_sums:
        (report,) = run_recipes([recipe], settings, progress)
        return GrowthReport(report, False, "the merge kept no sums (--keep-sums)")
    if settings.diagnose:
        (report,) = run_recipes([recipe], settings, progress)
        return GrowthReport(report, False, "a diagnosis measures every expert")
    with _earlier(folder, manifest) as earlier:
        (report,) = run_recipes([recipe], replace(settings, executor="threads"), progress, earlier=earlier)
    return GrowthReport(report, True)


def remove_experts(
    out: str | Path,
    names: Sequence[str],
    *,
    to: str | Path | None = None,
    settings: RunSettings | None = None,
    progress: Progress | None = None,
) -> GrowthReport:
    """Take experts out of a finished merge: merge the others by the recorded recipe.

    All others are read: a sum in floating point without one of its terms is not the rounded sum of the others.

    Args:
        out: directory of the finished merge.
        names: of the experts.
        to: directory of the new output; None: it replaces `out` when it is complete.
        settings: how to run.
        progress: receives callbacks.

    Raises:
        CheckpointError: no finished merge at `out`.
        RecipeError: no such expert, or none would be left.
        MergeError: whatever merging the others would raise; `out` is as it was.
    """
    folder, manifest = _finished(out)
    fields = _recorded(manifest, folder)
    known = [e["name"] for e in manifest["experts"]]
    listed = ", ".join(known)
    unknown = [
        f"{folder} was merged without an expert '{n}'.{did_you_mean(n, known)} Its experts: {listed}"
        for n in names
        if n not in known
    ]
    if unknown:
        raise RecipeError("There is no such expert to remove.", unknown)
    rest = [e for e, label in zip(fields["experts"], known, strict=True) if label not in names]
    if not names or not rest:
        raise RecipeError(f"Name some of the experts of {folder}, not all and not none: {listed}")
    recipe = make_recipe({**fields, "experts": rest, "out": str(to or folder)})
    (report,) = run_recipes([recipe], _replacing(settings, folder, to), progress)
    return GrowthReport(report, False, "a sum without one of its terms has other last bits")


def _replacing(settings: RunSettings | None, folder: Path, to: str | Path | None) -> RunSettings:
    """The settings, with which an output that is changed in place may be replaced."""
    settings = settings or RunSettings()
    in_place = to is None or Path(to).resolve() == folder.resolve()
    return replace(settings, overwrite=settings.overwrite or in_place)


def _finished(out: str | Path) -> tuple[Path, dict[str, Any]]:
    """Folder and manifest of a finished merge."""
    folder = Path(out)
    if not folder.is_dir():
        raise CheckpointError(f"{out}: expected the folder of a finished merge, found none. Give the --out of a merge.")
    return folder, read_manifest(folder)


def _recorded(manifest: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of the recorded recipe, with the inputs where they are now, and every expert with its name."""
    fields = dict(manifest["recipe"])
    if manifest["base"] is not None:
        fields["base"] = input_location(manifest["base"], folder)
    fields["experts"] = [
        {**expert, "path": input_location(entry, folder), "name": entry["name"]}
        for expert, entry in zip(fields["experts"], manifest["experts"], strict=True)
    ]
    return fields


@contextlib.contextmanager
def _earlier(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Earlier]:
    """The experts of a merge as its manifest has them, and its sums, open.

    Raises:
        CheckpointError: the sums are gone.
    """
    names = [e["name"] for e in manifest["experts"]]
    rows = [r for r in manifest["tensors"] if r.get("sums") is not None]
    if not (folder / SUMS).is_dir():
        raise CheckpointError(
            f"{folder}: its recipe keeps sums, but {folder / SUMS} is gone. Fix: fetch that folder, or merge all anew "
            "(actmat merge)."
        )
    kept = {row["name"]: _kept(row, names) for row in rows}
    with open_checkpoint(folder / SUMS) as sums:
        missing = [n for n in kept if n not in sums.specs]
        if missing:
            raise CheckpointError(f"{folder / SUMS}: the sum of '{missing[0]}' is missing, and {len(missing) - 1} more")
        experts = [_remembered(manifest, t, rows, folder) for t in range(len(names))]
        yield Earlier(experts, KeptSums(str(folder), len(names), sums, kept))


def _kept(row: Mapping[str, Any], names: Sequence[str]) -> KeptSum:
    sums, hashes = row["sums"], row["input_hashes"]
    return KeptSum(
        hashes=(sums["hash"], sums["sample"]),
        base_hash=hashes["base"],
        expert_hashes=tuple(hashes[n] for n in names),
        expert_norms=tuple((row.get("size") or {}).get("expert_norms", ())),
        weights=tuple(weights_of(row.get("weights"), len(names))),
        unmoved=frozenset(sums["unmoved"]),
    )


def _remembered(
    manifest: Mapping[str, Any], t: int, rows: Sequence[Mapping[str, Any]], folder: Path
) -> RememberedExpert:
    """Expert `t` of a merge, as its manifest has it."""
    entry = manifest["experts"][t]
    sources = {
        row["sources"][t]: Source(row["sources"][t], row["sums"]["kinds"][t], row["expert_dtypes"][t], 0)
        for row in rows
    }
    specs = {
        row["sources"][t]: TensorSpec(row["sources"][t], tuple(row["shape"]), row["expert_dtypes"][t], "")
        for row in rows
    }
    rename = _renaming(rows[0]["name"], rows[0]["sources"][t]) if rows else ("", "")
    for row in manifest["tensors"]:
        if row.get("sources") is None and row["action"] == "copy":
            name = rename[1] + row["name"].removeprefix(rename[0])
            specs.setdefault(name, TensorSpec(name, tuple(row["shape"]), row["dtype"], ""))
    specs |= {n: TensorSpec(n, (), "float32", "") for n in entry.get("ignored_tensors", ()) if n not in specs}
    return RememberedExpert(
        location=input_location(entry, folder),
        kind="adapter" if entry.get("hashes") is not None else "model",
        sources=sources,
        specs=specs,
        files=tuple(FileIdentity(f["path"], f["size"]) for f in entry.get("files", ())),
        n_tensors=entry.get("tensors", len(specs)),
        nbytes=entry.get("bytes", 0),
        commit=entry.get("commit", ""),
        contents=entry.get("hashes"),
    )


def _renaming(base: str, expert: str) -> tuple[str, str]:
    """Prefixes of the names of the base and of an expert, where they differ.

    >>> _renaming("layers.0.weight", "model.layers.0.weight")
    ('', 'model.')
    """
    if expert.endswith(base):
        return "", expert.removesuffix(base)
    return (base.removesuffix(expert), "") if base.endswith(expert) else ("", "")
