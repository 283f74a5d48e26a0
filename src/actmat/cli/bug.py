"""Report of an error that actmat does not raise on purpose: a bug, with all that is needed to repeat it."""

from __future__ import annotations

import os
import platform
import shlex
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from actmat.foreign import terminal
from actmat.version import __version__

RECIPES = (".yaml", ".yml", ".json")
LONGEST_RECIPE = 100_000
LIBRARIES = ("torch", "numpy", "safetensors", "pydantic", "transformers", "huggingface_hub")


def describe_bug(error: Exception, argv: Sequence[str]) -> str:
    """Message for the user, which names the file of the report that this writes into the temporary folder.

    Args:
        error: that nothing handled.
        argv: of the process.
    """
    found = terminal(f"{type(error).__name__}: {error}")[:200]  # it may quote an input
    report = "\n".join(_sections(error, argv))
    try:
        handle, path = tempfile.mkstemp(prefix="actmat-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(report)
    except OSError as problem:
        where = f"No report could be written ({problem.strerror})."
    else:
        where = f"Please send the report {path}; it has the command, the recipe and the versions, no weights."
    return f"this is a bug: {found}\n{where} Inputs are untouched; what a merge finished is kept for its next run."


def _sections(error: Exception, argv: Sequence[str]) -> Iterator[str]:
    """Parts of the report: versions, command, recipe, traceback."""
    versions = {"actmat": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    yield "== versions"
    yield from (f"{name} {version}" for name, version in versions.items())
    yield "\n== command"
    yield shlex.join(argv)
    for argument in argv[1:]:
        path = Path(argument)
        if path.suffix in RECIPES:
            yield f"\n== {argument}"
            yield _start_of(path)
    yield "\n== traceback"
    yield "".join(traceback.format_exception(error))


def _start_of(path: Path) -> str:
    """The text of a file, or the reason that there is none."""
    try:
        if not path.is_file():  # reading a pipe would wait for its writer
            return "(no file)"
        with path.open("rb") as file:
            return file.read(LONGEST_RECIPE).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        return f"({error})"
