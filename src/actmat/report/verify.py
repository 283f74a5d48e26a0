"""Does a merged model still match its manifest, and do its inputs?"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.hashing import ContentHash, hash_names
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import MergeError
from actmat.experts.resolve import is_adapter, open_adapter
from actmat.report.manifest import read_manifest

__all__ = ["Verification", "input_place", "verify"]

_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked and what does not match; `ok` when nothing differs.

    Args:
        tensors: output tensors whose bytes were hashed.
        inputs: names of the inputs that were checked.
        problems: every difference, in words.
    """

    tensors: int
    inputs: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No difference found."""
        return not self.problems


def verify(
    out: str | Path, *, inputs: bool = True, progress: Callable[[str, int], None] = lambda name, nbytes: None
) -> Verification:
    """Hash every tensor of the output, and of its inputs, again and compare with the manifest.

    Args:
        out: directory of a merged model.
        inputs: also check base and experts, where they can still be found.
        progress: called with a tensor's name and size after it was hashed.

    Raises:
        CheckpointError: no manifest, or the output is not a readable checkpoint.
    """
    directory = Path(out)
    manifest = read_manifest(directory)
    rows: list[dict[str, Any]] = manifest["tensors"]
    expected = {r["name"]: r["hash"] for r in rows}
    with _opened(directory) as checkpoint:
        problems = _compare(checkpoint, expected, "the output", progress)
    if hash_names(expected.items()) != manifest["output"]["content"]:
        problems.append("the manifest was edited: its tensors do not add up to its own content hash")
    checked = []
    if inputs:
        for label, place, wanted in _inputs(manifest, directory):
            try:
                with _opened(place) as checkpoint:
                    problems += _compare(checkpoint, wanted, f"input '{label}' ({place})", progress, partial=True)
                    checked.append(label)
            except MergeError as error:
                problems.append(f"input '{label}' cannot be checked: {error.problems[0]}")
    return Verification(len(expected), tuple(checked), tuple(problems))


def _inputs(manifest: Mapping[str, Any], out: Path) -> list[tuple[str, str, dict[str, str]]]:
    """(label, location, tensor name there -> hash) of every input."""
    if manifest.get("kind") == "adapter":
        return [(e["name"], input_place(e, out), e["hashes"]) for e in manifest["experts"]]
    rows: list[dict[str, Any]] = manifest["tensors"]
    base = {r["name"]: r["input_hashes"]["base"] for r in rows}
    found = [("base", input_place(manifest["base"], out), base)]
    for t, expert in enumerate(manifest["experts"]):
        label = expert["name"]
        read = (r for r in rows if "sources" in r and label in r["input_hashes"])
        if "hashes" in expert:  # an adapter: all that it stores, not the tensors that it changes
            found.append((label, input_place(expert, out), dict(expert["hashes"])))
            continue
        wanted = {r["sources"][t]: r["input_hashes"][label] for r in read}
        found.append((label, input_place(expert, out), wanted))
    return found


def _opened(place: str | Path) -> Checkpoint:
    """The stored tensors of a checkpoint or of an adapter."""
    return open_adapter(place).weights if is_adapter(place) else open_checkpoint(place)


def input_place(entry: Mapping[str, Any], out: Path) -> str:
    """Where an input is now: as seen from the output, else as it was given."""
    near = out / entry["from_here"] if "from_here" in entry else None
    return os.path.normpath(near) if near is not None and near.exists() else str(entry["location"])


def _compare(
    checkpoint: Checkpoint,
    expected: Mapping[str, str],
    what: str,
    progress: Callable[[str, int], None],
    *,
    partial: bool = False,
) -> list[str]:
    problems = [f"{what} lacks tensor '{n}'" for n in expected if n not in checkpoint.specs]
    if not partial:
        problems += [f"{what} has an extra tensor '{n}'" for n in checkpoint.specs if n not in expected]
    buffer = memoryview(bytearray(_PIECE))
    for name, spec in checkpoint.specs.items():
        if name not in expected:
            continue
        seen = ContentHash()
        while seen.size < spec.nbytes:
            piece = buffer[: min(_PIECE, spec.nbytes - seen.size)]
            checkpoint.read_into(name, seen.size, piece)
            seen.update(piece)
        if seen.hexdigest() != expected[name]:
            problems.append(f"tensor '{name}' of {what} ({spec.file}) has changed since the merge")
        progress(name, spec.nbytes)
    return problems
