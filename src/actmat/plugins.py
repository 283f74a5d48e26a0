"""Plug-ins: entry points of installed distributions, by which everything outside the core comes in.

    [project.entry-points."actmat.formats"]
    gguf = "actmat.extras.gguf.file:GGUF"

The parts of this distribution in `actmat.extras` come in like those of any other. A plug-in is imported when it is
needed first.

Groups and the objects that they name:

actmat.api        a function or class that `actmat.<name>` gives
actmat.codecs     `checkpoints.codecs.base.Codec`
actmat.commands   a command: a function, or a `typer.Typer`
actmat.destinations `run.places.Destination`: storage of outputs at URLs
actmat.executors  `engine.executors.base.ExecutorFactory`
actmat.experts    `experts.base.Family`
actmat.formats    `checkpoints.source.Format`
actmat.methods    `methods.MergeMethod`
actmat.readers    `experts.changes.base.Reader`: a family in PEFT's folders
actmat.recipes    `recipe.load.Importer`: a reader of another tool's configurations
actmat.statistics a function that `actmat.statistics.<name>` gives
actmat.stores     a kind of remote storage, see `checkpoints.resolve`
actmat.reports    a writer of pages about a merge, see `report.write`
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actmat.errors import MergeError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["entries", "load", "load_all"]

EXTRAS = "actmat.extras"


@functools.cache
def entries(group: str) -> Mapping[str, EntryPoint]:
    """Name -> entry point of the plug-ins of a group; those of this distribution first, then by name.

    An extra whose folder was removed is left out. Of two plug-ins with one name, the first counts.
    """
    from importlib.metadata import entry_points  # takes as long as a tenth of a short command
    from importlib.util import find_spec

    def rank(entry: EntryPoint) -> tuple[bool, str]:
        return not entry.module.startswith(f"{EXTRAS}."), entry.name

    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=rank):
        if entry.module.startswith(f"{EXTRAS}."):
            folder = ".".join(entry.module.split(".")[:3])
            if find_spec(EXTRAS) is None or find_spec(folder) is None:
                continue
        found.setdefault(entry.name, entry)
    return found


@functools.cache
def load(group: str, name: str) -> Any:
    """The plug-in of that name; None if there is none.

    Raises:
        MergeError: it cannot be imported; names the distribution.
    """
    entry = entries(group).get(name)
    if entry is None:
        return None
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        made_by = entry.dist.name if entry.dist is not None else "an installed distribution"
        raise MergeError(
            f"The plug-in '{name}' of {made_by} cannot be imported ({group}: {entry.value}): {error}. Likely cause: a "
            f"package that it needs is missing, or its version does not match. Fix: pip install -U {made_by}, or "
            "uninstall it."
        ) from error


def load_all(group: str) -> dict[str, Any]:
    """All plug-ins of a group by name, in the order of `entries`."""
    return {name: load(group, name) for name in entries(group)}
