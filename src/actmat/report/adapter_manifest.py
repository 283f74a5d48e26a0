"""Manifest and model card of a merged adapter; the same file, the same frame as those of a merged model."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from actmat.checkpoints.hashing import HASH_NAME, hash_names
from actmat.experts.lora.adapter import Adapter
from actmat.methods import get_method
from actmat.plan.adapter_model import AdapterPlan
from actmat.recipe.load import recipe_yaml
from actmat.report.manifest import FORMAT

__all__ = ["adapter_card", "build_adapter_manifest", "total_error"]


def total_error(records: Mapping[str, Mapping[str, Any]]) -> float:
    """Relative error of the truncation over all modules: `sqrt(sum error^2 / sum norm^2)`."""
    stats = [r["stats"] for r in records.values() if "error_norm" in r["stats"]]
    norm = math.fsum(s["norm"] ** 2 for s in stats)
    return math.sqrt(math.fsum(s["error_norm"] ** 2 for s in stats) / norm) if norm else 0.0


def build_adapter_manifest(
    plan: AdapterPlan,
    adapters: Sequence[Adapter],
    records: Mapping[str, Mapping[str, Any]],
    *,
    out: Path,
    seconds: float,
) -> dict[str, Any]:
    """The manifest as plain data; `modules` tells what was done, `tensors` what was written."""
    specs = {s.name: s for s in plan.specs}
    hashes = {n: h for r in records.values() for n, h in r["hashes"].items()}
    experts = []
    for summary, adapter in zip(plan.experts, adapters, strict=True):
        row = summary.to_json() | {"content": hash_names(adapter.hashes.items()), "hashes": dict(adapter.hashes)}
        if Path(summary.location).exists():
            row["from_here"] = os.path.relpath(summary.location, out)
        experts.append(row)
    return {
        "actmat_manifest": FORMAT,
        "kind": "adapter",
        "recipe": plan.recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True),
        "versions": dict(plan.versions),
        "hash": HASH_NAME,
        "base": None,
        "experts": experts,
        **({"statistics": [dict(s) for s in plan.statistics]} if plan.statistics else {}),
        "output": {
            "content": hash_names(hashes.items()),
            "files": {s.file: s.size for s in plan.shards},
            "relative_error": total_error(records),
        },
        "notes": list(plan.notes),
        "kept": dict(plan.kept),
        "modules": [i.to_json() | {"stats": records[i.name]["stats"]} for i in plan.tensors],
        "tensors": [{"name": n, "shape": list(specs[n].shape), "dtype": plan.dtype, "hash": hashes[n]} for n in specs],
        "timing": {
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "module_seconds": {n: r["seconds"] for n, r in records.items()},
        },
    }


def adapter_card(plan: AdapterPlan) -> str:
    """`README.md` of a merged adapter."""
    recipe, method = plan.recipe, get_method(plan.recipe.method)
    head = {
        "base_model": plan.config["base_model_name_or_path"],
        "library_name": "peft",
        "tags": ["merge", "actmat", "lora"],
    }
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        f"# Merge of {len(recipe.experts)} adapters with {recipe.method}",
        "",
        method.summary,
        "",
        f"    {method.equation}",
        "",
        f"Reference: {method.reference}.",
        "",
        "| adapter | from | weight |",
        "|---|---|---|",
        *(f"| {e.label} | {e.path} | {e.weight:g} |" for e in recipe.experts),
        "",
        f"{len(plan.modules)} modules of rank up to {max((m.rank for m in plan.modules), default=0)}, scaling 1.",
        "",
        "```yaml",
        recipe_yaml(recipe).strip(),
        "```",
        "",
        "`actmat_manifest.json` tells for every module what was done and why, with norms and the error of the",
        f"truncation; `actmat verify` checks the hashes. Made with actmat {plan.versions['actmat']}.",
        "",
    ]
    return "\n".join(lines)
