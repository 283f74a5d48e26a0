"""Methods from elsewhere: a user's own file, `--method ./my_rule.py:RULE`, and other installed distributions.

A file is run as Python. A distribution, and an extra of this one, offers a `MergeMethod` by an entry point of the group
`actmat.methods`, named as the method; entry points are looked up for names that are not in `METHODS`, and to list all.
The `method_version` is part of a plan's fingerprint.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

from actmat.errors import RecipeError, did_you_mean
from actmat.methods.contract import MergeMethod
from actmat.plugins import entries, is_extra, load

GROUP: Final = "actmat.methods"


def is_user_method(name: str) -> bool:
    """True if a method's name refers to a file, `PATH.py:NAME`."""
    path, colon, _ = name.rpartition(":")
    return bool(colon) and path.endswith(".py")


def load_installed_method(name: str) -> MergeMethod | None:
    """The method of an extra or another distribution; None if no entry point has this name.

    Raises:
        MergeError: it cannot be imported.
        RecipeError: it is not a `MergeMethod` of this name.
    """
    found = load(GROUP, name, object)
    if found is not None and (not isinstance(found, MergeMethod) or found.name != name):
        origin = f"method '{name}' of {_distribution(entries(GROUP)[name])}"
        raise RecipeError(f"{origin}: expected a MergeMethod called '{name}', got {found!r}")
    return found


def method_version(name: str) -> str | None:
    """SHA-256 of a user's file, or the distribution of an installed method; None for a method of this package."""
    if is_user_method(name):
        return hashlib.sha256(_file(name).read_bytes()).hexdigest()
    entry = entries(GROUP).get(name)
    return None if entry is None or is_extra(entry) else _distribution(entry)


def _distribution(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def load_user_method(name: str) -> MergeMethod:
    """The `MergeMethod` called NAME in the file of `PATH.py:NAME`; its name becomes that text, as recipes write it."""
    return _load(name, method_version(name) or "")


@functools.lru_cache(maxsize=64)  # a file that is edited is another one each time
def _load(name: str, digest: str) -> MergeMethod:
    path, attribute = _file(name), name.rpartition(":")[2]
    spec = importlib.util.spec_from_file_location(f"actmat_user_{digest[:16]}", path)
    assert spec is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        # Not by the loader: it takes compiled files by time and size, and would run an earlier edit of the same second.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:  # a user's file may raise anything; the message names the file
        raise RecipeError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, MergeMethod):
        rules = [n for n, value in vars(module).items() if isinstance(value, MergeMethod)]
        raise RecipeError(
            f"{path} has no MergeMethod called '{attribute}'.{did_you_mean(attribute, rules)} "
            f"It holds: {', '.join(rules) or 'none'}"
        )
    return dataclasses.replace(found, name=name)


def _file(name: str) -> Path:
    path = Path(name.rpartition(":")[0])
    if not os.path.isfile(path):
        raise RecipeError(f"method '{name}' names the file {path}, which does not exist; write PATH.py:NAME.")
    return path
