"""`actmat_manifest.json`: what was wanted, what it was made from, what happened to every tensor."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.checkpoints.hashing import HASH_NAME, hash_names, sha256_file
from actmat.checkpoints.writing.staging import MANIFEST_NAME
from actmat.errors import CheckpointError
from actmat.plan.model import InputSummary, MergePlan

__all__ = ["FORMAT", "build_manifest", "read_manifest", "write_manifest"]

FORMAT = 1
"""Version of the manifest's layout; see docs/formats/manifest.md."""

REQUIRED = frozenset({"base", "experts", "output", "tensors"})


def build_manifest(
    plan: MergePlan, records: Mapping[str, Mapping[str, Any]], *, out: Path, seconds: float, files: Sequence[str]
) -> dict[str, Any]:
    """The manifest as plain data.

    Everything outside `timing` is a function of the recipe, the inputs and the versions: two runs, interrupted or
    not, give the same.

    Args:
        plan: what was to be done.
        records: tensor name -> record from the engine, for every tensor.
        out: final directory; inputs on the same disk are also listed relative to it, so that they are found again.
        seconds: wall time of the run that finished it.
        files: files copied from the inputs.
    """
    tensors = []
    for item in plan.tensors:
        record = records[item.name]
        row = item.to_json()
        for key in ("read_bytes", "write_bytes", "peak_bytes"):
            row.pop(key)
        row |= {k: record[k] for k in ("hash", "stats", "unchanged", "nonfinite")}
        row["input_hashes"] = {"base": record["base_hash"]} | dict(
            zip(plan.recipe.labels, record["expert_hashes"], strict=False)
        )
        tensors.append(row)
    return {
        "actmat_manifest": FORMAT,
        "recipe": plan.recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True),
        "versions": dict(plan.versions),
        "device": plan.device,
        "family": plan.family,
        "hash": HASH_NAME,
        "base": _input(plan.base, out) | {"content": _content(records, None, plan.tensors)},
        "experts": [
            _input(e, out) | {"content": _content(records, t, plan.tensors)} for t, e in enumerate(plan.experts)
        ],
        **({"statistics": [dict(s) for s in plan.statistics]} if plan.statistics else {}),
        "output": {
            "content": hash_names((n, r["hash"]) for n, r in records.items()),
            "files": {s.file: s.size for s in plan.shards},
            "copied_files": list(files),
        },
        "notes": list(plan.notes),
        "tensors": tensors,
        "timing": {
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "tensor_seconds": {n: r["seconds"] for n, r in records.items()},
        },
    }


def _input(summary: InputSummary, out: Path) -> dict[str, Any]:
    row = summary.to_json()
    if Path(summary.location).exists():
        row["from_here"] = os.path.relpath(summary.location, out)
    return row


def _content(records: Mapping[str, Mapping[str, Any]], expert: int | None, tensors: Sequence[Any]) -> str:
    """Hash over the tensors that were read from one input."""
    pairs = []
    for item in tensors:
        record = records[item.name]
        if expert is None:
            pairs.append((item.name, record["base_hash"]))
        elif item.sources:
            pairs.append((item.sources[expert], record["expert_hashes"][expert]))
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
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {MANIFEST_NAME}: it is no merge made by actmat, or the file was removed."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("actmat_manifest") != FORMAT:
        found = manifest.get("actmat_manifest") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(f"{path} has layout {found}; this version of actmat reads layout {FORMAT}.")
    if missing := REQUIRED - manifest.keys():
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}.")
    return manifest
