"""`actmat_manifest.json`: recipe, inputs, the record of every tensor, and content hashes of the whole."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from actmat.bounds import MAX_WRITTEN_VALUES, local_path, read_object
from actmat.checkpoints.hashing import HASH_NAME, ContentHash, hash_file, hash_names
from actmat.checkpoints.writing.listed import MANIFEST_NAME, REPORTS
from actmat.checkpoints.writing.staging import JOURNAL_NAME
from actmat.diagnostics.model import write_whole
from actmat.diagnostics.totals import Totals
from actmat.engine.record import Record
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas
from actmat.planning.item import WriteKind
from actmat.planning.model import InputSummary, Item, MergePlan
from actmat.report.rows import StreamedRows


def hashes_of(
    plan: MergePlan, records: Mapping[str, Record]
) -> tuple[dict[str, str], dict[str, str], list[dict[str, str]]]:
    """Name -> hash of the items, of the tensors that were read from the base, and of those of each expert."""
    items, base = dict[str, str](), dict[str, str]()
    experts: list[dict[str, str]] = [{} for _ in plan.experts]
    for item in plan.items:
        record = records[item.tied_to or item.name]
        items[item.name], base[item.name] = record.hash, record.base_hash
        for t, source in enumerate(item.sources if item.has_base else ()):
            if source is not None:
                experts[t][source.name] = record.expert_hashes[t]
    return items, base, experts


FORMAT = 1
"""Version of the manifest's layout; see docs/formats/manifest.md."""


def build_manifest(
    plan: MergePlan,
    records: Mapping[str, Record],
    experts: Sequence[Deltas],
    *,
    out: Path | None,
    fingerprint: str,
    seconds: float,
    totals: Totals,
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """The manifest as plain data, except for its longest lists, which are `StreamedRows` made from the records.

    Everything outside `timing` is a function of the recipe, the inputs and the versions: two runs, interrupted or
    not, give the same. `write_manifest` adds the hashes of the files.

    Args:
        records: item -> its record; tied tensors have that of the tensor they are tied to.
        experts: opened; adapters are recorded with the hashes of all that they store.
        out: final directory; inputs on the same disk are also listed relative to it, so that they are found again.
            None for an output in a bucket.
        fingerprint, seconds: of the plan, by which the same call knows the output; wall time of the run.
        totals: of the records.
        files: copied from the inputs.
    """
    is_adapter = plan.output == "adapter"
    items, of_base, of_experts = hashes_of(plan, records)
    tensors: list[dict[str, Any]]
    if is_adapter:
        tensors = _written_tensors(plan, records)
        made: dict[str, Any] = {"relative_error": totals.relative_error}
        content = hash_names((t["name"], t["hash"]) for t in tensors)
    else:
        tensors = StreamedRows(lambda: (_tensor_row(plan, i, records) for i in plan.items))
        made = {"copied_files": list(files), "left_out": dict(plan.left_out)}
        content = hash_names(items.items())
    modules = StreamedRows(lambda: (_module_row(item, records[item.name]) for item in plan.items))
    return {
        "actmat_manifest": FORMAT,
        **({"kind": "adapter"} if is_adapter else {}),
        "recipe": plan.recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True),
        "versions": dict(plan.versions),
        **({} if is_adapter else {"device": plan.device, "family": plan.family}),
        "hash": HASH_NAME,
        "base": None if plan.base is None else _input_row(plan.base, of_base, out, is_listed=plan.is_extracted),
        "experts": [_expert_row(plan, e, t, of_experts[t], out) for t, e in enumerate(experts)],
        **({"statistics": [_located(dict(s), out) for s in plan.statistics]} if plan.statistics else {}),
        "output": {"content": content, "files": {s.file: s.size for s in plan.shards}, **made},
        "notes": [dataclasses.asdict(note) for note in plan.notes],
        **({"kept": dict(plan.kept), "modules": modules} if is_adapter else {}),
        "tensors": tensors,
        "timing": {
            "plan": fingerprint,
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            ("module_seconds" if is_adapter else "tensor_seconds"): {
                i.name: 0.0 if i.tied_to else round(records[i.tied_to or i.name].seconds, 6) for i in plan.items
            },
        },
    }


def _tensor_row(plan: MergePlan, item: Item, records: Mapping[str, Record]) -> dict[str, Any]:
    """One tensor of a model: its plan and its record."""
    record = records[item.tied_to or item.name]
    row: dict[str, Any] = {
        "name": item.name,
        "shape": list(item.shape),
        "role": str(item.layout.role),
        "action": item.action,
        "reason": item.reason,
        "dtype": item.base_dtype,
        "out_dtype": item.out_dtype,
    }
    if item.call is not None:
        row |= item.call.to_json()
        row["sources"] = [s.name for s in item.sources if s is not None]
    if item.tied_to is not None:
        row["tied_to"] = item.tied_to
    row |= {"hash": record.hash, "stats": record.stats, "unchanged": record.unchanged}
    row |= {} if record.size is None else {"size": dict(record.size)}
    hashes = dict(zip(plan.recipe.labels, record.expert_hashes, strict=False))
    return row | {"input_hashes": {"base": record.base_hash} | hashes}


EXTRACTED: Mapping[WriteKind, str] = {"svd": "factored", "sum": "saved", "nothing": "left out"}
"""Forms of tensors in an extracted adapter, as manifests call them."""


def _module_row(item: Item, record: Record) -> dict[str, Any]:
    """The plan and the record of one module of an adapter, of a tensor trained in full, or of an extracted one."""
    row: dict[str, Any] = {"name": item.name, "shape": list(item.shape), "action": item.action, "reason": item.reason}
    write = item.write
    if item.is_extracted:
        row |= {"kind": EXTRACTED[write.kind], "module": write.module, "why": write.why}
        row |= {"unchanged": record.unchanged} | ({} if record.size is None else {"size": dict(record.size)})
    elif item.is_module:
        row["kind"] = item.module.kind
    if write.rank:
        row["rank"] = write.rank
    row |= {"outputs": [s.name for s in item.outputs], "stats": record.stats}
    return row | (item.call.to_json() if item.call is not None else {})


def _written_tensors(plan: MergePlan, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Tensors of an adapter as written."""
    hashes = {name: digest for r in records.values() for name, digest in r.hashes.items()}
    return [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype, "hash": hashes[s.name]} for s in plan.specs]


def _expert_row(plan: MergePlan, expert: Deltas, t: int, read: Mapping[str, str], out: Path | None) -> dict[str, Any]:
    """The entry of an expert; of an adapter, and for an extraction, with hashes that the rows of the output lack.

    Args:
        read: stored name -> hash of all tensors that were read, or formed from an adapter.
    """
    hashes = read if expert.stored is None else expert.stored.hashes
    return _input_row(plan.experts[t], hashes, out, is_listed=plan.is_extracted or expert.stored is not None)


def _input_row(
    summary: InputSummary, hashes: Mapping[str, str], out: Path | None, *, is_listed: bool
) -> dict[str, Any]:
    """The entry of one input. Its files are named below the place that the user gave, without the folders above it."""
    row = summary.to_json()
    for file in row["files"]:
        file["path"] = _as_given(file["path"], summary.models or (summary.location,))
    row = _located(row, out) | {"content": hash_names(hashes.items())}
    return row | ({"hashes": dict(hashes)} if is_listed else {})


def _as_given(path: str, places: Sequence[str]) -> str:
    """A file's path as the user would write it; the name only of a file that a link in one of the places leads to."""
    if not os.path.isabs(path):  # on the hub, at a URL, in memory
        return path
    for place in places:
        if Path(path).is_relative_to(whole := os.path.realpath(place)):
            return Path(place, os.path.relpath(path, whole)).as_posix()
    return os.path.basename(path)


def _located(row: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """A row with the place of its `location` relative to the output, where both are on this machine."""
    if out is not None and os.path.exists(row["location"]):
        with contextlib.suppress(ValueError):  # on another drive of Windows
            row["from_here"] = Path(os.path.relpath(row["location"], out)).as_posix()
    return row


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Add the hashes of all other files in `directory`, and its own, to a manifest, and write it there, row by row.

    Nothing is written there afterwards.
    """
    output = manifest["output"]
    known = {MANIFEST_NAME, f".{MANIFEST_NAME}.part", JOURNAL_NAME, *output["files"]}
    files = {p.relative_to(directory).as_posix(): p for p in sorted(directory.rglob("*")) if p.is_file()}
    rows = {n: {"size": p.stat().st_size, "hash": hash_file(p)} for n, p in files.items() if n not in known}
    output["side_files"] = {n: row for n, row in rows.items() if n not in REPORTS}
    if reports := {n: row for n, row in rows.items() if n in REPORTS}:
        manifest["timing"]["reports"] = reports
    manifest["content"] = manifest_content(manifest)
    pieces = json.JSONEncoder(indent=1, ensure_ascii=False).iterencode(manifest)
    write_whole(directory / MANIFEST_NAME, (text.encode() for text in chain(pieces, "\n")))


def manifest_content(manifest: Mapping[str, Any]) -> str:
    """Content hash of a manifest: its JSON with sorted keys, without white space, `content` and `timing`.

    >>> manifest_content({"b": 1, "a": [2]}) == manifest_content({"a": [2], "b": 1, "timing": {}})
    True

    Raises:
        CheckpointError: nested too deeply to be written.
    """
    fields = {k: v for k, v in manifest.items() if k not in ("content", "timing")}
    total = ContentHash()
    try:
        for text in json.JSONEncoder(sort_keys=True, separators=(",", ":")).iterencode(fields):
            total.update(text.encode())
    except RecursionError:
        raise CheckpointError("the manifest is damaged: its values are nested too deeply") from None
    return total.hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a merged model, all of whose fields have the types and the parts that readers expect.

    Raises:
        CheckpointError: none there, damaged, or of another layout; lists every problem with its place.
    """
    path = local_path(directory) / MANIFEST_NAME
    if not os.path.lexists(path):
        reason = "it is not a merge made by actmat, or the file was removed."
        if os.path.isfile(directory):
            reason = "it is one file, whose metadata hold the recipe only. Merge into a folder to have hashes to verify"
        raise CheckpointError(f"{directory} has no {MANIFEST_NAME}: {reason}")
    why = ""
    try:
        manifest = read_object(path, values=MAX_WRITTEN_VALUES, unique=True)
        json.dumps(manifest, ensure_ascii=False).encode()  # what cannot be written again cannot be shown or hashed
    except UnicodeEncodeError as error:
        why = f"it holds half of a surrogate pair, {error.object[error.start]!a}, which is not text"
    except RecursionError:
        why = "its values are nested too deeply"
    except CheckpointError as error:
        why = error.problems[0].removeprefix(f"{path}: ")
    if why:
        raise CheckpointError(f"{path} is damaged: {why}")
    if manifest.get("actmat_manifest") != FORMAT:
        layout = repr(manifest.get("actmat_manifest"))[:80]
        raise CheckpointError(f"{path} has layout {layout}; this version of actmat reads layout {FORMAT}.")
    from actmat.report.schema import manifest_problems  # a merge that writes one needs no schema

    if problems := manifest_problems(manifest):
        raise CheckpointError(
            f"{path} is damaged: {len(problems)} problem{'s' * (len(problems) > 1)}. Likely cause: it was edited, or "
            "cut off. Fix: fetch the folder again, or merge again.",
            problems,
        )
    return manifest


def expert_hashes(manifest: Mapping[str, Any], name: str) -> dict[str, str]:
    """Stored name -> hash of every tensor that was read from an expert; of an adapter, of all that it stores."""
    t = [e["name"] for e in manifest["experts"]].index(name)
    if manifest["experts"][t].get("hashes") is not None:
        return dict(manifest["experts"][t]["hashes"])
    rows = (r for r in manifest["tensors"] if r.get("sources") is not None)
    return {r["sources"][t]: r["input_hashes"][name] for r in rows}


def input_location(entry: Mapping[str, Any], out: Path) -> str:
    """Present location of an input: relative to the output if it is there, a commit on the hub, or as it was given."""
    near = out / entry["from_here"] if entry.get("from_here") else None
    if near is None and entry.get("commit"):
        return f"{str(entry['location']).partition('@')[0]}@{entry['commit']}"
    if near is None and entry.get("pinned"):
        return str(entry["pinned"])
    return os.path.normpath(near) if near is not None and os.path.exists(near) else str(entry["location"])
