"""Plug-ins: entry points of installed distributions, by which everything outside the core comes in.

    [project.entry-points."actmat.formats"]
    gguf = "actmat.extras.gguf.file:GGUF"

The parts of this distribution in `actmat.extras` come in like those of any other. A plug-in is imported when it is
needed first.

Groups and the objects that they name:

actmat.api        a function or class that `actmat.<name>` gives
actmat.codecs     `checkpoints.codecs.base.Codec`
actmat.commands   a command: a function, or a `typer.Typer`
actmat.conversions  `experts.base.Conversion`: a checkpoint read in the layout of its base
actmat.exports    a function `(located, out, *, options) -> words` that writes another tool's form
actmat.executors  `engine.executors.base.ExecutorFactory`
actmat.experts    `experts.base.Family`
actmat.formats    `checkpoints.source.Format`
actmat.layouts    `image`: a function `(adapter, layout) -> (adapter, problems)`, see `experts.locate.in_layout`;
                  `file`: merges into files, see `run.recipes`
actmat.methods    `methods.MergeMethod`
actmat.readers    `experts.changes.base.Reader`: a family in PEFT's folders
actmat.recipes    `recipe.load.Importer`: a reader of another tool's configurations
actmat.statistics a function that `actmat.statistics.<name>` gives
actmat.stores     `checkpoints.remote.Storage`, named by the scheme of its URLs
actmat.views      `checkpoints.resolve.View`: a checkpoint made of others; `stack`: opens layers of several
actmat.flags      the function that a flag of a core command calls, such as `--serve`, see `cli.flags.behind`
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actmat.errors import MergeError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXTRAS = "actmat.extras"


_removed: dict[str, dict[str, str]] = {}
"""Group -> `removed`; filled by `entries`."""


def is_extra(entry: EntryPoint) -> bool:
    """True for a part of this distribution."""
    return entry.module.startswith(f"{EXTRAS}.")


@functools.cache
def entries(group: str) -> Mapping[str, EntryPoint]:
    """Name -> entry point of the plug-ins of a group; those of this distribution first, then by name.

    An extra whose folder was removed is left out. Of two plug-ins with one name, the first counts.
    """
    from importlib.metadata import entry_points  # takes as long as a tenth of a short command
    from importlib.util import find_spec

    has_extras = find_spec(EXTRAS) is not None

    def rank(entry: EntryPoint) -> tuple[bool, str]:
        return not is_extra(entry), entry.name

    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=rank):
        if is_extra(entry):
            folder = ".".join(entry.module.split(".")[:3])
            if not has_extras or find_spec(folder) is None:
                _removed.setdefault(group, {})[entry.name] = folder
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
    except Exception as error:  # foreign code may raise anything
        made_by = entry.dist.name if entry.dist is not None else "an installed distribution"
        raise MergeError(
            f"The plug-in '{name}' of {made_by} cannot be imported ({group}: {entry.value}): "
            f"{type(error).__name__}: {error}. Likely cause: a package that it needs is missing, or its version does "
            f"not match. Fix: pip install -U {made_by}, or uninstall it."
        ) from error


def needed(group: str, name: str) -> Any:
    """The plug-in of that name.

    Raises:
        MergeError: there is none.
    """
    found = load(group, name)
    if found is None:
        raise MergeError(f"Expected the plug-in '{name}' of the group {group}, found none.{hint(group, name)}")
    return found


def load_all(group: str) -> dict[str, Any]:
    """All plug-ins of a group by name, in the order of `entries`."""
    return {name: load(group, name) for name in entries(group)}


def removed(group: str) -> Mapping[str, str]:
    """Name -> package of an extra that is declared and was removed."""
    entries(group)
    return _removed.get(group, {})


def hint(group: str, name: str | None = None) -> str:
    """Sentences for an error that a plug-in, of this name or any, might have avoided; empty if no extra was removed.

    Begins with a space.
    """
    folders = sorted({folder for n, folder in removed(group).items() if name in (None, n)})
    if not folders:
        return ""
    return (
        f" Likely cause: a part of actmat was removed from this installation ({', '.join(folders)}). Fix: pip install "
        "--force-reinstall --no-deps actmat."
    )
