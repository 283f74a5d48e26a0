"""Places of a run, checked before anything is opened: executor, devices, and the folders or URLs of its outputs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actmat.bounds import is_url
from actmat.checkpoints.remote import check_upload_url
from actmat.checkpoints.resolve import find_source
from actmat.checkpoints.side_files import WEIGHT_SUFFIXES
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.checkpoints.writing.staging import check_output_path
from actmat.diagnostics.model import REPORT_NAME
from actmat.engine.devices import check_device, device_room
from actmat.engine.executors import THREADS, computes_here, find_executor
from actmat.errors import CheckpointError, MergeError, OutputError, Problems, RecipeError
from actmat.planning.work import HOST, DeviceRoom
from actmat.recipe import Recipe
from actmat.report.manifest import read_manifest
from actmat.settings import RunSettings

Writes = Literal["nothing", "outputs"]


@dataclass(frozen=True)
class Places:
    """Places of a run.

    Args:
        settings: of the run.
        executor: name of the executor.
        room: devices that may merge items.
        outs: final folder or URL of the output of each recipe; empty if nothing is written.
        finished: those of them that hold the output of the same recipe.
    """

    settings: RunSettings
    executor: str
    room: DeviceRoom
    outs: tuple[Path | str, ...] = ()
    finished: frozenset[Path | str] = frozenset()


def find_places(
    recipes: Sequence[Recipe],
    settings: RunSettings,
    writes: Writes,
    problems: Problems,
    *,
    inputs: Mapping[str, Path | str],
    here: bool,
) -> Places:
    """The places of a run; problems with devices, executor and outputs are noted.

    Args:
        recipes: of the run.
        settings: of the run: its executor counts, else the recipe's, else `threads`.
        writes: whether outputs are written.
        problems: receives problems.
        inputs: name -> folder, file or URL that no output may replace.
        here: whether the run takes place on this machine; devices of a plan need not be here.

    Raises:
        RecipeError: a recipe names no output.
    """
    executor, room = settings.executor or recipes[0].executor or THREADS, HOST
    if here:
        with problems.noted():
            find_executor(executor, settings.device)
    with problems.noted():
        if here and computes_here(executor):
            check_device(settings.device)
        room = device_room(settings.device, settings.device_memory)
    if writes == "nothing":
        return Places(settings, executor, room)
    outs = tuple(_out_path(r) for r in recipes)
    pairs = () if settings.overwrite or settings.held else zip(recipes, outs, strict=True)
    finished = frozenset(out for recipe, out in pairs if has_manifest_of(recipe, out))
    with problems.noted():
        _check_outputs(outs, settings.overwrite, finished, inputs)
    return Places(settings, executor, room, outs, finished)


def _out_path(recipe: Recipe) -> Path | str:
    """Final directory of a recipe's output, or its URL.

    Raises:
        RecipeError: it names no output.
    """
    if recipe.out is None:
        raise RecipeError("No output given: pass --out, or 'out' in the recipe.")
    if is_url(recipe.out):
        scheme, mark, rest = recipe.out.rstrip("/").partition("://")
        return f"{scheme.lower()}{mark}{rest}"
    out = Path(recipe.out)
    return out if out.name not in ("", "..") else out.resolve()  # '.' and '..' have no siblings to build in


def has_manifest_of(recipe: Recipe, out: Path | str) -> bool:
    """True if `out` has the manifest of a merge by this recipe."""
    try:
        with present_output(out) as folder:
            fields = recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True)
            return bool(read_manifest(folder).get("recipe") == fields)
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
    if problems := check_upload_url(out):  # no request: another check reports them
        raise CheckpointError(problems[0])
    source = find_source(out)
    names = [n for n in (MANIFEST_NAME, REPORT_NAME) if n in source.names]
    if MANIFEST_NAME not in names:
        raise CheckpointError(f"{out} has no {MANIFEST_NAME}")
    folders = [source.fetch(name).parent for name in names]
    yield folders[0]


def _check_outputs(
    outs: Sequence[Path | str], overwrite: bool, finished: frozenset[Path | str], inputs: Mapping[str, Path | str]
) -> None:
    """Refuse folders that outputs may not be written to.

    Raises:
        OutputError: in use, an input, or given twice; all problems in one.
    """
    fix = "one file (.safetensors) is made of LoRA files of image models, or on a base that is one. Fix: another ending"
    problems = [f"{out} would be a folder: {fix}" for out in outs if str(out).lower().endswith(WEIGHT_SUFFIXES)]
    for out in outs:
        if isinstance(out, str):
            problems += check_upload_url(out) or _input_problems(out, inputs)
        else:
            local = {name: path for name, path in inputs.items() if isinstance(path, Path)}
            problems += check_output_path(out, overwrite=overwrite or out in finished, inputs=local)
    places = [o.resolve() if isinstance(o, Path) else o.rstrip("/") for o in outs]
    twice = sorted({str(o) for o, place in zip(outs, places, strict=True) if places.count(place) > 1})
    problems += [f"several merges are to be written to {o}" for o in twice]
    if problems:
        raise OutputError("The output cannot be written there.", problems)


SYNONYMS = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "local": "file"}
"""Schemes of URLs that name the same places as another one."""


def _input_problems(out: str, inputs: Mapping[str, Path | str]) -> list[str]:
    """Problems of a URL that is, contains or lies inside an input."""
    problems, place = [], _folder_of(out)
    for label, path in inputs.items():
        source = _folder_of(f"file://{os.path.realpath(path)}" if isinstance(path, Path) else path)
        if source.startswith(place):
            problems.append(f"{out} is, or contains, an input of this merge ({label}); write somewhere else")
        elif place.startswith(source):
            problems.append(f"{out} lies inside an input of this merge ({label}); write somewhere else")
    return problems


def _folder_of(url: str) -> str:
    """A URL in one form, with a slash at its end: without the revision of a hub id, and one scheme for its synonyms."""
    scheme, _, rest = url.partition("://")
    scheme = SYNONYMS.get(scheme.lower(), scheme.lower())
    rest = rest.partition("@")[0] if scheme == "hf" else rest
    return f"{scheme}://{'/'.join(filter(None, rest.split('/')))}/"
