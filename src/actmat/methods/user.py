"""Methods from a user's own file: `--method ./my_rule.py:RULE`.

The file is run as Python. Its content is part of a plan's fingerprint.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
from pathlib import Path

from actmat.errors import RecipeError, did_you_mean
from actmat.methods.contract import MergeMethod

__all__ = ["is_user_method", "load_user_method", "user_method_hash"]


def is_user_method(name: str) -> bool:
    """True if a method's name means a file, `PATH.py:NAME`."""
    path, colon, _ = name.rpartition(":")
    return bool(colon) and path.endswith(".py")


def user_method_hash(name: str) -> str:
    """SHA-256 of the file that holds the method."""
    return hashlib.sha256(_file(name).read_bytes()).hexdigest()


def load_user_method(name: str) -> MergeMethod:
    """The `MergeMethod` called NAME in the file of `PATH.py:NAME`; its name becomes that text, as recipes write it."""
    return _load(name, user_method_hash(name))


@functools.cache
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
        raise RecipeError(f"method '{name}' names the file {path}, and there is none; write PATH.py:NAME.")
    return path
