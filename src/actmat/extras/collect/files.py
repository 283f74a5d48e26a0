"""Files of statistics: written, and added up, which is exact, as sums are stored."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.bounds import list_folder, local_path
from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.writing.shards import plan_shards
from actmat.checkpoints.writing.staging import disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.errors import OutputError, StatisticsError
from actmat.extras.collect.inputs.sums import GramSum
from actmat.statistics.header import FILE_NAME, METADATA_KEY, GramInfo, GramOf, StatisticsHeader, content_hash
from actmat.statistics.store import Statistics, open_statistics
from actmat.statistics.triangle import packed_shape

HELD_BYTES = 1 << 30
"""Sums of several files that are held in memory at most, in place of adding up twice."""


def check_output(out: Path, *, overwrite: bool) -> None:
    """Check that statistics can be written to the folder `out`."""
    local_path(out, error=OutputError)
    if out.is_dir():
        names = list_folder(out, error=OutputError)
        if names and names != [FILE_NAME]:
            raise OutputError(f"{out} contains other files ({', '.join(names[:3])}); choose another folder.")
        if names and not overwrite:
            raise OutputError(f"{out} already contains statistics; choose another folder or pass --overwrite.")
    elif out.exists() or out.is_symlink():
        raise OutputError(f"{out} exists and is not a directory; choose another folder.")


def write_statistics(
    out: Path,
    header: StatisticsHeader,
    specs: list[TensorSpec],
    read: Callable[[str], Tensor],
    *,
    overwrite: bool = False,
) -> None:
    """Write a statistics file into the folder `out`; it appears whole or not at all, in place of an earlier one.

    The header has the hashes of all tensors; `read` computes the values of a tensor, and is called once for each.
    """
    check_output(out, overwrite=overwrite)
    text = header.model_dump_json(exclude_defaults=True)
    (shard,) = plan_shards(specs, 1 << 62, stem="statistics", metadata={METADATA_KEY: text})
    partial = out.parent / f".{out.name}.actmat-partial-{os.getpid()}"
    with disk_errors(partial):
        partial.mkdir(parents=True)
        try:
            writer = ShardWriter(partial, [shard])
            try:
                for spec in specs:
                    writer.sink(spec.name).write(raw_bytes(read(spec.name).contiguous()))
                writer.finish(specs)
            finally:
                writer.close()
            out.mkdir(exist_ok=True)
            os.replace(partial / FILE_NAME, out / FILE_NAME)
            partial.rmdir()
        except BaseException:  # an interruption too: no partial folder is left
            shutil.rmtree(partial, ignore_errors=True)
            raise


def merge_statistics(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    repeated: bool = False,
) -> StatisticsHeader:
    """Write the statistics of all batches together, and return their header.

    The inputs are of the same model (and the same adapter state), of different data unless they may be `repeated`. The
    stored sums have the `dtype` given, else the widest of the inputs.

    Raises:
        StatisticsError: they are of different models or layers, or of the same data; all problems.
    """
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_statistics(p)) for p in inputs]
        if len(opened) < 2:
            raise StatisticsError(f"Merging takes at least two statistics files; found {len(opened)}.")
        problems = [*_differences(opened), *([] if repeated else _repeated_data(opened))]
        if problems:
            raise StatisticsError("The statistics cannot be added up.", problems)
        stored = {s.dtype for f in opened for s in f.specs.values() if s.is_floating}
        specs = _specs(opened, dtype or ("float64" if "float64" in stored else "float32"))
        total = _totals(opened, specs)
        if sum(spec.nbytes for spec in specs.values()) <= HELD_BYTES:
            total = functools.cache(total)  # for its hash, then for the file
        hashes = {name: content_hash(total(name)) for name in specs}
        header = _header([f.header for f in opened], hashes)
        write_statistics(Path(out), header, list(specs.values()), total, overwrite=overwrite)
    return header


def join_statistics(inputs: Sequence[str | Path], out: str | Path) -> StatisticsHeader:
    """Write the statistics of different layers of one model, measured on the same data, as one file.

    Raises:
        StatisticsError: they are of different models or data, or have tensors in common; all problems.
    """
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_statistics(p)) for p in inputs]
        first = opened[0]
        problems = list(_differences(opened))
        for other in opened[1:]:
            if [d.fingerprint for d in other.header.data] != [d.fingerprint for d in first.header.data]:
                problems.append(f"{other.location} is of other data than {first.location}")
            if twice := sorted(first.specs.keys() & other.specs.keys()):
                problems.append(f"{other.location} and {first.location} both hold '{twice[0]}'")
        if problems:
            raise StatisticsError("The statistics cannot be joined.", problems)
        specs = {name: TensorSpec(name, s.shape, s.dtype, "") for f in opened for name, s in f.specs.items()}
        owner = {name: file for file in opened for name in file.specs}
        hashes = {name: content_hash(owner[name].raw(name)) for name in specs}
        headers = [f.header for f in opened]
        header = headers[0].model_copy(update=_added(headers, hashes))
        write_statistics(Path(out), header, list(specs.values()), lambda name: owner[name].raw(name), overwrite=False)
    return header


def _totals(opened: Sequence[Statistics], specs: Mapping[str, TensorSpec]) -> Callable[[str], Tensor]:
    """Stored tensor -> its sum over all files that have it."""

    def total(name: str) -> Tensor:
        parts = [f.raw(name) for f in opened if name in f.specs]
        if sum(map(len, parts)) == specs[name].shape[0]:  # few rows, see `_specs`
            return torch.cat(parts).to(torch_dtype(specs[name].dtype))
        first, *others = (_summed(part, specs[name]) for part in parts)
        value = first.to(torch.int64 if specs[name].dtype == "int64" else torch.float64, copy=True)
        for part in others:
            value += part
        return value.to(torch_dtype(specs[name].dtype))

    return total


def _summed(stored: Tensor, spec: TensorSpec) -> Tensor:
    """A stored sum; of a Gram whose rows are stored, their sum."""
    if tuple(stored.shape) == spec.shape:
        return stored
    total = GramSum(stored.shape[1], dtype=stored.dtype)
    total.add(stored)
    return total.stored(whole=True)


def _differences(opened: Sequence[Statistics]) -> Iterator[str]:
    """Differences of model, adapter or kinds between the first file and any other."""
    first = opened[0]
    for other in opened[1:]:
        a, b = first.header.model, other.header.model
        if a.content != b.content:
            changed = [n for n in a.tensors if a.tensors[n] != b.tensors.get(n)]
            shown = f", such as '{changed[0]}'" if changed else ""
            yield (
                f"{other.location} is of another model ({b.location}) than {first.location} ({a.location}): "
                f"{len(changed)} tensors differ{shown}"
            )
        elif (a.adapter and a.adapter.content) != (b.adapter and b.adapter.content):
            yield f"{other.location} is of another adapter state than {first.location}"
        if first.header.kinds != other.header.kinds:
            kinds = " and ".join(", ".join(sorted(f.header.kinds)) for f in (first, other))
            yield f"{first.location} and {other.location} hold different kinds: {kinds}"
        if first.header.fisher and other.header.fisher and first.header.fisher_labels != other.header.fisher_labels:
            yield f"{other.location} took labels for the Fisher from elsewhere than {first.location}"
        for name in first.header.places.keys() & other.header.places.keys():
            mine, theirs = _by_part(first.header, name), _by_part(other.header, name)
            if any(mine[k] != theirs[k] for k in mine.keys() & theirs.keys()):
                yield f"'{name}' shares its Gram with other layers in {other.location} than elsewhere"


def _repeated_data(opened: Sequence[Statistics]) -> Iterator[str]:
    """Batches that two files have in common."""
    taken: dict[str, str] = {}
    for file in opened:
        for data in file.header.data:
            if data.fingerprint in taken:
                yield f"{file.location} and {taken[data.fingerprint]} were measured on the same batches"
            taken[data.fingerprint] = file.location


def _specs(opened: Sequence[Statistics], dtype: str) -> dict[str, TensorSpec]:
    """Tensors of the new file; the rows of a Gram stay rows while they are few."""
    out: dict[str, TensorSpec] = {}
    problems = []
    for name in {name: None for file in opened for name in file.specs}:
        files, key = [f for f in opened if name in f.specs], name.removeprefix("gram.")
        infos = [f.header.grams[key] for f in files] if name.startswith("gram.") else []
        rows = sum(info.rows for info in infos)
        shapes = {f.specs[name].shape for f in files}
        if infos and 2 * rows <= infos[0].width and all(f.holds_rows(key) for f in files):
            shapes = {(rows, info.width) for info in infos}
        elif infos:
            shapes = {packed_shape(info.width, info.groups) for info in infos}
        spec = files[0].specs[name]
        out[name] = TensorSpec(name, min(shapes), dtype if spec.is_floating else spec.dtype, "")
        if len(shapes) > 1:
            problems.append(f"tensor '{name}' has another shape in {files[0].location} than elsewhere")
    if problems:
        raise StatisticsError("The statistics cannot be added up.", problems)
    return out


def _header(headers: Sequence[StatisticsHeader], hashes: Mapping[str, str]) -> StatisticsHeader:
    common: dict[str, Any] = {name: sum(getattr(h, name) for h in headers) for name in ("samples", "tokens")}
    common["data"] = [d for h in headers for d in h.data]
    return headers[0].model_copy(update=common | _added(headers, hashes))


def _added(headers: Sequence[StatisticsHeader], hashes: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the statistics of all files together, given the hashes of the added tensors."""
    grams: dict[str, GramInfo] = {}
    for key in {k: None for h in headers for k in h.grams}:
        same = [h.grams[key] for h in headers if key in h.grams]
        update = {"rows": sum(g.rows for g in same), "hash": hashes[f"gram.{key}"]}
        grams[key] = same[0].model_copy(update=update)
    places: dict[str, list[GramOf]] = {}
    for name in sorted({n for h in headers for n in h.places}):
        parts = {k: v for h in headers for k, v in _by_part(h, name).items()}
        places[name] = [GramOf(gram=g, expert=e, rows=list(r) if r else None) for (e, r), g in parts.items()]
    stacks = {k: None for h in headers for k in h.stacks}
    counts = {n: hashes[f"counts.{n}"] for h in headers for n in h.counts}
    return {
        "grams": grams,
        "places": places,
        "stacks": {n: sum(h.stacks.get(n, 0) for h in headers) for n in stacks},
        "absent": {n: w for h in headers for n, w in h.absent.items() if n not in places and n not in counts},
        "counts": counts,
        "fisher": {n: hashes[f"fisher.{n}"] for h in headers for n in h.fisher},
        "fisher_samples": sum(h.fisher_samples for h in headers),
        "fisher_labels": next((h.fisher_labels for h in headers if h.fisher), ""),
    }


def _by_part(header: StatisticsHeader, name: str) -> dict[tuple[int | None, tuple[int, ...] | None], str]:
    """Part of a stored tensor (expert of a stack, output features) -> key of its Gram."""
    return {(p.expert, tuple(p.rows) if p.rows else None): p.gram for p in header.places.get(name, [])}
