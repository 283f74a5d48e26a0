"""Check a merged model and its inputs against the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.hashing import ContentHash, hash_names
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import MergeError
from actmat.experts.resolve import is_adapter, open_adapter
from actmat.report.manifest import expert_hashes, input_location, read_manifest

__all__ = ["Verification", "verify"]

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Verification:
    """Number of output tensors that were hashed, names of the inputs that were checked, every difference found."""

    tensors: int
    inputs: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if no difference was found."""
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
    expected = {r["name"]: r["hash"] for r in manifest["tensors"]}
    with _opened(directory) as checkpoint:
        problems = _compare(checkpoint, expected, "the output", progress)
    if hash_names(expected.items()) != manifest["output"]["content"]:
        problems.append("the manifest was edited: its tensors do not add up to its own content hash")
    checked = []
    if inputs:
        for label, location, wanted in _inputs(manifest, directory):
            try:
                with _opened(location) as checkpoint:
                    problems += _compare(checkpoint, wanted, f"input '{label}' ({location})", progress, partial=True)
                    checked.append(label)
            except MergeError as error:
                problems.append(f"input '{label}' cannot be checked: {error.problems[0]}")
    return Verification(len(expected), tuple(checked), tuple(problems))


def _inputs(manifest: Mapping[str, Any], out: Path) -> list[tuple[str, str, dict[str, str]]]:
    """(label, location, stored name -> hash) of every input."""
    found = [(e["name"], input_location(e, out), expert_hashes(manifest, e["name"])) for e in manifest["experts"]]
    if manifest["base"] is None:
        return found
    base = {r["name"]: r["input_hashes"]["base"] for r in manifest["tensors"]}
    return [("base", input_location(manifest["base"], out), base), *found]


def _opened(location: str | Path) -> Checkpoint:
    """The stored tensors of a checkpoint or of an adapter."""
    return open_adapter(location).weights if is_adapter(location) else open_checkpoint(location)


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
    buffer = memoryview(bytearray(_CHUNK))
    for name, spec in checkpoint.specs.items():
        if name not in expected:
            continue
        seen = ContentHash()
        while seen.size < spec.nbytes:
            chunk = buffer[: min(_CHUNK, spec.nbytes - seen.size)]
            checkpoint.read_into(name, seen.size, chunk)
            seen.update(chunk)
        if seen.hexdigest() != expected[name]:
            problems.append(f"tensor '{name}' of {what} ({spec.file}) has changed since the merge")
        progress(name, spec.nbytes)
    return problems
