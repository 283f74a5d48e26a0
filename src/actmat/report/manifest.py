"""`actmat_manifest.json`: recipe, inputs, and the record of every tensor."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import MAX_WRITTEN_VALUES, local_path, read_object
from actmat.checkpoints.hashing import HASH_NAME, hash_names, sha256_file
from actmat.checkpoints.writing.staging import MANIFEST_NAME
from actmat.engine.task import Record
from actmat.errors import CheckpointError
from actmat.experts.base import Expert
from actmat.plan.model import InputSummary, Item, MergePlan

__all__ = ["build_manifest", "expert_hashes", "input_location", "read_manifest", "total_error", "write_manifest"]

FORMAT = 1
"""Version of the manifest's layout; see docs/formats/manifest.md."""

REQUIRED = frozenset({"base", "experts", "output", "tensors"})


def build_manifest(
    plan: MergePlan,
    records: Mapping[str, Record],
    experts: Sequence[Expert],
    *,
    out: Path,
    seconds: float,
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """The manifest as plain data.

    Everything outside `timing` is a function of the recipe, the inputs and the versions: two runs, interrupted or
    not, give the same.

    Args:
        records: item -> its record; tied tensors have that of the tensor they are tied to.
        experts: opened; adapters are recorded with the hashes of all that they store.
        out: final directory; inputs on the same disk are also listed relative to it, so that they are found again.
        seconds: wall time of the run that finished it.
        files: copied from the inputs.
    """
    is_adapter = plan.output == "adapter"
    tensors = _written_tensors(plan, records) if is_adapter else [_tensor_row(plan, i, records) for i in plan.items]
    output: dict[str, Any] = {
        "content": hash_names((t["name"], t["hash"]) for t in tensors),
        "files": {s.file: s.size for s in plan.shards},
    }
    output |= {"relative_error": total_error(records)} if is_adapter else {"copied_files": list(files)}
    adapter: dict[str, Any] = {}
    if is_adapter:
        modules = [_module_row(item) | {"stats": records[item.name].stats} for item in plan.items]
        adapter = {"kept": dict(plan.kept), "modules": modules}
    return {
        "actmat_manifest": FORMAT,
        **({"kind": "adapter"} if is_adapter else {}),
        "recipe": plan.recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True),
        "versions": dict(plan.versions),
        **({} if is_adapter else {"device": plan.device, "family": plan.family}),
        "hash": HASH_NAME,
        "base": None if plan.base is None else _input(plan.base, out) | {"content": _content(plan, records, None)},
        "experts": [_expert(plan, records, t, e, out) for t, e in enumerate(experts)],
        **({"statistics": [dict(s) for s in plan.statistics]} if plan.statistics else {}),
        "output": output,
        "notes": list(plan.notes),
        **adapter,
        "tensors": tensors,
        "timing": {
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            ("module_seconds" if is_adapter else "tensor_seconds"): {
                i.name: 0.0 if i.tied_to else round(records[i.tied_to or i.name].seconds, 6) for i in plan.items
            },
        },
    }


def total_error(records: Mapping[str, Record]) -> float:
    """Relative error of the truncation over all modules: `sqrt(sum error^2 / sum norm^2)`."""
    stats = [r.stats for r in records.values() if "error_norm" in r.stats]
    norm = math.fsum(s["norm"] ** 2 for s in stats)
    return math.sqrt(math.fsum(s["error_norm"] ** 2 for s in stats) / norm) if norm else 0.0


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
    if item.layout.blocks:
        row["blocks"] = {b.name: [b.start, b.stop] for b in item.layout.blocks}
    if item.layout.orientation != "OI":
        row["orientation"] = item.layout.orientation
    if item.call is not None:
        row |= item.call.to_json()
        row["sources"] = [s.name for s in item.sources if s is not None]
        row["expert_dtypes"] = list(item.expert_dtypes)
    if item.form == "factored":
        row["factored"] = True
    if item.tied_to is not None:
        row["tied_to"] = item.tied_to
    if item.pool:
        row["pool"] = item.pool
    row |= {"hash": record.hash, "stats": record.stats, "unchanged": record.unchanged, "nonfinite": record.nonfinite}
    hashes = dict(zip(plan.recipe.labels, record.expert_hashes, strict=False))
    return row | {"input_hashes": {"base": record.base_hash} | hashes}


def _module_row(item: Item) -> dict[str, Any]:
    """The plan of one module of an adapter, or of a tensor trained in full."""
    done = {"action": item.action, "reason": item.reason}
    outputs, factors = [s.name for s in item.outputs], item.factors
    if factors is None:
        return {"name": item.name, "shape": list(item.shape), **done, "outputs": outputs}
    assert item.call is not None
    return {
        "name": item.name,
        "kind": factors.kind,
        "shape": list(item.shape),
        "expert_ranks": list(factors.ranks),
        "exact_rank": factors.exact_rank,
        "rank": factors.rank,
        **done,
        "factored": item.form == "factored",
        "outputs": outputs,
        **({"blocks": {b.name: [b.start, b.stop] for b in factors.blocks}} if factors.blocks else {}),
        **item.call.to_json(),
    }


def _written_tensors(plan: MergePlan, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Tensors of an adapter as written."""
    hashes = {name: digest for r in records.values() for name, digest in r.hashes.items()}
    return [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype, "hash": hashes[s.name]} for s in plan.specs]


def _expert(plan: MergePlan, records: Mapping[str, Record], t: int, expert: Expert, out: Path) -> dict[str, Any]:
    row, hashes = _input(plan.experts[t], out), expert.hashes()
    if plan.output == "model":
        row["content"] = _content(plan, records, t)
    if hashes is not None:  # its tensors are not those of the output: all are checked
        row = row | {"content": row.get("content", hash_names(hashes.items())), "hashes": dict(hashes)}
    return row


def _input(summary: InputSummary, out: Path) -> dict[str, Any]:
    row = summary.to_json()
    if os.path.exists(summary.location):
        row["from_here"] = os.path.relpath(summary.location, out)
    return row


def _content(plan: MergePlan, records: Mapping[str, Record], expert: int | None) -> str:
    """Hash over the tensors that were read from the base, or from one expert."""
    pairs = []
    for item in plan.items:
        record = records[item.tied_to or item.name]
        if expert is None:
            pairs.append((item.name, record.base_hash))
        elif item.sources and (source := item.sources[expert]) is not None:
            pairs.append((source.name, record.expert_hashes[expert]))
    return hash_names(pairs)


def write_manifest(directory: Path, manifest: dict[str, Any], *, sha256: bool = False) -> None:
    """Write it into `directory`; with `sha256`, the SHA-256 of every weight file is added (one more reading)."""
    if sha256:
        manifest["output"]["sha256"] = {f: sha256_file(directory / f) for f in manifest["output"]["files"]}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a merged model.

    Raises:
        CheckpointError: none there, damaged, or of a newer actmat.
    """
    path = local_path(directory) / MANIFEST_NAME
    if not os.path.lexists(path):
        reason = "it is no merge made by actmat, or the file was removed."
        raise CheckpointError(f"{directory} has no {MANIFEST_NAME}: {reason}")
    try:
        manifest = read_object(path, values=MAX_WRITTEN_VALUES)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error.problems[0].removeprefix(f'{path}: ')}") from None
    if manifest.get("actmat_manifest") != FORMAT:
        found = repr(manifest.get("actmat_manifest"))[:120]
        raise CheckpointError(f"{path} has layout {found}; this version of actmat reads layout {FORMAT}.")
    if missing := REQUIRED - manifest.keys():
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}.")
    return manifest


def expert_hashes(manifest: Mapping[str, Any], name: str) -> dict[str, str]:
    """Stored name -> hash of every tensor that was read from an expert; of an adapter, of all that it stores."""
    t = [e["name"] for e in manifest["experts"]].index(name)
    if "hashes" in manifest["experts"][t]:
        return dict(manifest["experts"][t]["hashes"])
    rows = (r for r in manifest["tensors"] if "sources" in r and name in r["input_hashes"])
    return {r["sources"][t]: r["input_hashes"][name] for r in rows}


def input_location(entry: Mapping[str, Any], out: Path) -> str:
    """Present location of an input: relative to the output if it is there, else as it was given."""
    near = out / entry["from_here"] if "from_here" in entry else None
    return os.path.normpath(near) if near is not None and os.path.exists(near) else str(entry["location"])
