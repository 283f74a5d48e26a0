"""Outputs that an earlier run of the same command finished: recognised, verified, and not made again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.remote import (
    MARK_NAME,
    check_upload_url,
    clear_upload,
    present_sizes,
    staging_folder,
    staging_for,
)
from actmat.checkpoints.resolve import find_source
from actmat.checkpoints.writing.staging import MANIFEST_NAME, Staging
from actmat.diagnostics.model import REPORT_NAME
from actmat.errors import CheckpointError, MergeError, OutputError
from actmat.planning import MergePlan
from actmat.planning.model import InputSummary
from actmat.recipe import Recipe
from actmat.report import read_manifest, verify
from actmat.report.manifest import input_location
from actmat.settings import RunSettings

__all__ = ["check_finished", "check_same_merge", "has_manifest_of", "present_output"]


def has_manifest_of(recipe: Recipe, out: Path | str) -> bool:
    """True if `out` has the manifest of a merge by this recipe; decided without the inputs."""
    try:
        with present_output(out) as folder:
            return bool(read_manifest(folder).get("recipe") == _recipe_json(recipe))
    except (MergeError, OSError):
        return False


@contextlib.contextmanager
def present_output(out: Path | str) -> Iterator[Path]:
    """Local folder with the manifest and the report of an output; copies, if the output is at a URL.

    Raises:
        CheckpointError: nothing is there.
    """
    if isinstance(out, Path):
        yield out
        return
    if problems := check_upload_url(out):  # no request: another check tells them
        raise CheckpointError(problems[0])
    source = find_source(out)
    names = [n for n in (MANIFEST_NAME, REPORT_NAME) if n in source.names]
    clears = MARK_NAME in source.names and read_object(source.fetch(MARK_NAME)).get("clearing")
    if clears or MANIFEST_NAME not in names:  # while an output is replaced, its manifest is the old one
        raise CheckpointError(f"{out} has no {MANIFEST_NAME}")
    folders = [source.fetch(name).parent for name in names]
    yield folders[0]


def check_finished(plan: MergePlan, out: Path | str, folder: Path, settings: RunSettings) -> None:
    """Compare an output and its inputs with its manifest, and that with the plan; remove leftovers.

    Tensors and inputs of an output in a folder are hashed again; of one at a URL, the sizes of its files are compared.

    Args:
        folder: with its manifest, see `present_output`.

    Raises:
        OutputError: it is not what this plan would give now, or another process builds there.
    """
    try:
        manifest = read_manifest(folder)
        problems = list(_differences(plan, manifest, folder, settings))
        if not problems:
            problems = list(verify(out).problems) if isinstance(out, Path) else list(_other_sizes(manifest, out))
    except MergeError as error:
        problems = list(error.problems)
    if problems:
        said = "; ".join(problems[:3]) + ("; ..." if len(problems) > 3 else "")
        raise OutputError(
            f"{out} exists and is not empty; choose another place or pass --overwrite. It was made by the same "
            f"recipe, but is not what the recipe gives now: {said}"
        )
    if isinstance(out, Path):
        Staging(out, plan.fingerprint()).sweep()
        return
    clear_upload(out)
    if staging_folder(out, settings.staging).parent.is_dir():
        shards = () if plan.is_extracted else plan.shards
        staging_for(out, settings.staging, plan.fingerprint(), shards).sweep()


def check_same_merge(plan: MergePlan, out: Path, settings: RunSettings) -> None:
    """Compare the manifest of `out` with the plan; no tensor is read.

    Raises:
        OutputError: it is not what this plan would give now.
    """
    problems = list(_differences(plan, read_manifest(out), out, settings))
    if problems:
        raise OutputError(f"{out} is finished, but is not what the recipe gives now.", problems)


def _other_sizes(manifest: Mapping[str, Any], url: str) -> Iterator[str]:
    """Files of an output at a URL that are missing, or of another size than the merge wrote."""
    there = present_sizes(url)
    side = {n: row["size"] for n, row in manifest["output"]["side_files"].items()}
    for name, size in {**manifest["output"]["files"], **side}.items():
        if name not in there:
            yield f"file '{name}' is missing"
        elif there[name] != size:
            yield f"file '{name}' has {there[name]} bytes, the merge wrote {size}"


def _differences(plan: MergePlan, manifest: Mapping[str, Any], out: Path, settings: RunSettings) -> Iterator[str]:
    """Reasons why a finished output is not that of the plan, apart from the bytes of its tensors and inputs."""
    output, rows = manifest["output"], manifest.get("modules", manifest["tensors"])
    if manifest.get("versions") != dict(plan.versions):
        yield f"it was made with the versions {manifest.get('versions')}, these are {dict(plan.versions)}"
    made_on = str(manifest.get("device", plan.device))
    if made_on.partition(":")[0] != plan.device.partition(":")[0]:
        yield f"it was made on {made_on}"
    if _placeless(manifest.get("statistics", [])) != _plain([dict(s) for s in plan.statistics]):
        yield "the statistics are others"
    found = [manifest["base"], *manifest["experts"]] if plan.base is not None else manifest["experts"]
    if len(found) != len(plan.inputs) or not all(map(_is_input, plan.inputs, found, [out] * len(found))):
        yield "the inputs are others, or in another place"
    planned = [[i.name, list(i.shape), i.action, i.reason] for i in plan.items]
    if [[row.get(k) for k in ("name", "shape", "action", "reason")] for row in rows] != planned:
        yield "other tensors would be merged"
    if not plan.is_extracted and output.get("files") != {s.file: s.size for s in plan.shards}:
        yield "its weight files are others"
    if settings.sha256 and "sha256" not in output:
        yield "it was made without --sha256"
    if settings.diagnose and not (out / REPORT_NAME).is_file():
        yield "it was made without --diagnose"


def _placeless(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a manifest without their place relative to the output."""
    return [{k: v for k, v in row.items() if k != "from_here"} for row in rows]


def _is_input(summary: InputSummary, row: Any, out: Path) -> bool:
    """True if an entry of the manifest is this input, in the same place."""
    if not isinstance(row, Mapping) or any(row.get(k) != v for k, v in _plain(summary.to_json()).items()):
        return False
    pinned = bool(summary.commit or summary.pinned)
    return pinned or os.path.realpath(input_location(row, out)) == os.path.realpath(summary.location)


def _recipe_json(recipe: Recipe) -> Any:
    """The recipe as a manifest has it."""
    return _plain(recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True))


def _plain(data: Any) -> Any:
    """Data as it comes back from JSON."""
    return json.loads(json.dumps(data))
