"""Plug-ins: entry points of installed distributions, by which everything outside the core comes in.

    [project.entry-points."actmat.formats"]
    gguf = "actmat.extras.gguf.file:GGUF"

The parts of this distribution in `actmat.extras` come in like those of any other. A plug-in is imported on first
use.

Seven registries, and the objects that they hold:

actmat.codecs     `checkpoints.codecs.base.Codec`
actmat.commands   a command of another distribution: a function, or a `typer.Typer`
actmat.executors  `engine.executors.base.ExecutorFactory`
actmat.experts    `experts.deltas.AdapterFamily`; `reader.NAME`: `experts.changes.base.Reader`, for folders of PEFT;
                  `layout.NAME`: `experts.locate.ConvertLayout`, an adapter with the names of another tool
actmat.formats    `checkpoints.model.Format`; `view.NAME`: a model made of others, see `checkpoints.resolve`
actmat.methods    `methods.MergeMethod`
actmat.stores     `checkpoints.remote.Storage`, named by the scheme of its URLs
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from actmat.errors import MergeError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXTRAS = "actmat.extras"

Registry: TypeAlias = Literal[
    "actmat.codecs",
    "actmat.commands",
    "actmat.executors",
    "actmat.experts",
    "actmat.formats",
    "actmat.methods",
    "actmat.stores",
]
T = TypeVar("T")


def is_extra(entry: EntryPoint) -> bool:
    """True for a part of this distribution."""
    return entry.module.startswith(f"{EXTRAS}.")


@functools.cache
def entries(group: Registry) -> Mapping[str, EntryPoint]:
    """Name -> entry point of the plug-ins of a group; those of this distribution first, then by name.

    An extra whose folder was removed is left out. Of two plug-ins with one name, the first counts.
    """
    from importlib.metadata import entry_points  # takes as long as a tenth of a short command
    from importlib.util import find_spec

    has_extras = find_spec(EXTRAS) is not None

    def rank(entry: EntryPoint) -> tuple[bool, str]:
        return not is_extra(entry), entry.name

    plugins: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=rank):
        folder = ".".join(entry.module.split(".")[:3])
        if not is_extra(entry) or (has_extras and find_spec(folder) is not None):
            plugins.setdefault(entry.name, entry)
    return plugins


@functools.lru_cache(maxsize=1024)  # a name may come from a recipe, and belong to no plug-in
def _loaded(group: Registry, name: str) -> object:
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


def load(group: Registry, name: str, kind: type[T]) -> T | None:
    """The plug-in of that name, or None.

    Args:
        group: the registry.
        name: of the entry point.
        kind: class or runtime protocol of the object.

    Raises:
        MergeError: it cannot be imported, or is of another kind; names the distribution.
    """
    plugin = _loaded(group, name)
    if plugin is None or isinstance(plugin, kind):
        return plugin
    entry = entries(group)[name]
    made_by = entry.dist.name if entry.dist is not None else "an installed distribution"
    raise MergeError(
        f"The plug-in '{name}' of {made_by} ({group}: {entry.value}): expected a {kind.__name__}, found a "
        f"{type(plugin).__name__}. Likely cause: it was made for another version of actmat. Fix: pip install -U "
        f"{made_by}, or uninstall it."
    )


def needed(group: Registry, name: str, kind: type[T]) -> T:
    """The plug-in of that name.

    Raises:
        MergeError: it is missing, or see `load`.
    """
    plugin = load(group, name, kind)
    if plugin is None:
        raise MergeError(f"Expected the plug-in '{name}' of the group {group}, found none")
    return plugin


def load_all(group: Registry, kind: type[T], prefix: str = "") -> dict[str, T]:
    """The plug-ins `PREFIX.NAME` of a group by name, or those without a prefix, in the order of `entries`."""
    return {name: needed(group, name, kind) for name in names(group, prefix)}


def names(group: Registry, prefix: str = "") -> list[str]:
    """Names of the plug-ins `PREFIX.NAME` of a group, or of those without a prefix."""
    return [name for name in entries(group) if name.rpartition(".")[0] == prefix]
