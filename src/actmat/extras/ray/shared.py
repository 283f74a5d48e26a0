"""Check that workers share the driver's storage: token files next to the outputs, identities of the inputs."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from actmat.checkpoints.base import FileIdentity
from actmat.checkpoints.writing.staging import disk_errors
from actmat.engine.inputs import Inputs
from actmat.engine.session import SessionSpec
from actmat.system import BINARY, NOFOLLOW


def _token_path(folder: Path) -> Path:
    """Path next to the folder, because all files inside it become part of the output."""
    return folder.parent / f"{folder.name}-token"


@contextlib.contextmanager
def prepared_storage(spec: SessionSpec) -> Iterator[Mapping[Path, str]]:
    """Create shards that other machines can open, and a token next to every output folder; yields folder -> token.

    Raises:
        OutputError: a disk error.
    """
    tokens: dict[Path, str] = {}
    try:
        for plan, folder in zip(spec.plans, spec.outputs, strict=True):
            if folder is None:
                continue
            with disk_errors(folder):
                for shard in plan.shards:
                    _sync(folder / shard.file)  # flush the driver's headers and sizes to the shared storage
                tokens[folder] = secrets.token_hex(16)
                path = _token_path(folder)
                path.unlink(missing_ok=True)  # left by a killed run; never write through a link
                with path.open("x", encoding="ascii") as file:
                    file.write(tokens[folder])
                    file.flush()
                    os.fsync(file.fileno())
        yield tokens
    finally:
        for folder in tokens:
            with contextlib.suppress(OSError):
                _token_path(folder).unlink()


def storage_problems(tokens: Mapping[Path, str], node: str) -> list[str]:
    """Problems: folders that this worker does not share with its driver."""
    problems = []
    for folder, token in tokens.items():
        path = _token_path(folder)
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            text = ""
            said = error.strerror or type(error).__name__
        else:
            said = "its content differs"
        if text != token:
            problems.append(f"node {node} does not see the output's folder {folder}: {path}: {said}")
    return problems


def input_problems(spec: SessionSpec, inputs: Inputs, node: str) -> list[str]:
    """Problems: inputs whose files differ from those of the plan."""
    sources = [*([inputs.base] if inputs.base is not None else []), *(e.model for e in inputs.experts)]
    problems = []
    planned = [s for s in spec.plans[0].inputs if inputs.base is not None or s is not spec.plans[0].base]
    for summary, source in zip(planned, sources, strict=True):
        if _content(summary.files) != _content(source.tensors.identity()):
            problems.append(
                f"node {node} has other files at {summary.location} ({summary.label}) than the driver: sizes or times "
                "differ"
            )
    return problems


def _content(files: Sequence[FileIdentity]) -> list[tuple[str, int, int, str]]:
    """Parts of identities that are equal on all machines; excludes the inode change time."""
    return [(Path(f.path).name, f.size, f.modified_ns, f.etag) for f in files]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | NOFOLLOW | BINARY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
