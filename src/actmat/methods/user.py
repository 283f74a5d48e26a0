"""Methods from elsewhere: a user's own file, `--method ./my_rule.py:RULE`, and other installed distributions.

A file is run as Python. A distribution, and an extra of this one, offers a `MergeMethod` by an entry point of the group
`actmat.methods`, named as the method; entry points are looked up for names that are not in `METHODS`, and to list all.
The `method_version` is part of a plan's fingerprint.

A function `deltas -> delta` is a method too, in a file or in memory; the latter gets a name that holds in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import os
import secrets
import types
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from actmat.errors import MergeError, RecipeError, did_you_mean
from actmat.methods.contract import MergeMethod
from actmat.methods.facets import Merged
from actmat.plugins import entries, is_extra, load

GROUP: Final = "actmat.methods"

AnyMethod = str | MergeMethod | Callable[..., Any]
"""A method by its name, its declaration, or a function `deltas -> delta`."""
IN_MEMORY: Final[dict[str, MergeMethod]] = {}
"""Methods of this process that have no file, by the names that `hold_method` gave them."""


def method_of(function: Callable[..., Any], name: str = "") -> MergeMethod:
    """The method of a function of whole matrices, `deltas -> delta`; its keyword-only arguments are its options.

    >>> method_of(lambda deltas, *, by=2.0: by * deltas[0]).merge([torch.ones(1, 2)]).value
    tensor([[2., 2.]])
    """
    name = name or getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def merge(deltas: Sequence[Tensor], **options: Any) -> Merged:
        listed = list(deltas)
        try:
            result = function(listed, **options)
        except (MergeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a user's function may raise anything
            inside = error.__traceback__ and error.__traceback__.tb_next
            line = f" in line {inside.tb_lineno}" if inside else ""
            shape = "x".join(map(str, listed[0].shape))
            raise RecipeError(
                f"method '{name}' raised {type(error).__name__}{line}, given {len(listed)} deltas of {shape}: {error}"
            ) from error
        value = result.value if isinstance(result, Merged) else torch.as_tensor(result).to(listed[0])
        if value.shape != listed[0].shape:
            raise RecipeError(f"method '{name}': expected shape {[*listed[0].shape]}, found {[*value.shape]}")
        return result if isinstance(result, Merged) else Merged(value)

    return MergeMethod(name, merge, "matrix")


def hold_method(method: MergeMethod) -> str:
    """The name under which recipes of this process refer to a method without a file."""
    name = f"{method.name.strip('<>')}@{_digest(inspect.unwrap(method.merge))[:8]}"
    IN_MEMORY[name] = dataclasses.replace(method, name=name)
    return name


@functools.cache
def _digest(function: Callable[..., Any]) -> str:
    """Hash of a function's source; random, but the same for one function, where that does not determine it."""
    source = ""
    if getattr(function, "__name__", "<lambda>") != "<lambda>" and not getattr(function, "__closure__", None):
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(function)
    return hashlib.sha256(source.encode()).hexdigest() if source else secrets.token_hex(32)


def is_user_method(name: str) -> bool:
    """True if a method's name refers to a file, `PATH.py:NAME`."""
    path, colon, _ = name.rpartition(":")
    return bool(colon) and path.endswith(".py")


def load_installed_method(name: str) -> MergeMethod | None:
    """The method of this process, an extra, or another distribution; None if no entry point has this name.

    Raises:
        MergeError: it cannot be imported.
        RecipeError: it is not a `MergeMethod` of this name.
    """
    if name in IN_MEMORY:
        return IN_MEMORY[name]
    method = load(GROUP, name, object)
    if method is not None and (not isinstance(method, MergeMethod) or method.name != name):
        origin = f"method '{name}' of {_distribution(entries(GROUP)[name])}"
        raise RecipeError(f"{origin}: expected a MergeMethod called '{name}', got {method!r}")
    return method


def method_version(name: str) -> str | None:
    """SHA-256 of a user's file or function, or the distribution of an installed method; None for this package's."""
    if is_user_method(name):
        return hashlib.sha256(_file(name).read_bytes()).hexdigest()
    if name in IN_MEMORY:
        return _digest(inspect.unwrap(IN_MEMORY[name].merge))
    entry = entries(GROUP).get(name)
    return None if entry is None or is_extra(entry) else _distribution(entry)


def _distribution(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def load_user_method(name: str | Callable[..., Any]) -> MergeMethod:
    """The method of a function, or called NAME in the file of `PATH.py:NAME`; its name becomes that text."""
    if not isinstance(name, str):
        return method_of(name)
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
    method = getattr(module, attribute, None)
    if isinstance(method, types.FunctionType):
        return method_of(method, name)
    if not isinstance(method, MergeMethod):
        modules = {MergeMethod.__module__, module.__name__}
        kinds = MergeMethod | types.FunctionType
        rules = [n for n, v in vars(module).items() if isinstance(v, kinds) and v.__module__ in modules]
        raise RecipeError(
            f"{path} has no function or MergeMethod called '{attribute}'.{did_you_mean(attribute, rules)} "
            f"It holds: {', '.join(rules) or 'none'}"
        )
    return dataclasses.replace(method, name=name)


def _file(name: str) -> Path:
    path = Path(name.rpartition(":")[0])
    if not os.path.isfile(path):
        raise RecipeError(f"method '{name}' names the file {path}, which does not exist; write PATH.py:NAME.")
    return path
