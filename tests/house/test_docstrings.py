"""Dotted names that docstrings and comments put in backticks are names of things that exist."""

import ast
import importlib
import inspect
import re
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.helpers.repository import PACKAGE, ROOT, module_name, modules, package_name, tree, type_names

import actmat

NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")
OTHERS = re.compile(r"\.(?:bin|html|json|jsonl|md|png|pt|py|safetensors|svg|txt|yaml|\w+_proj)$|\bNAME\b")
"""Names of files and tensors, and those with a part that stands for many."""
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
ENTRIES = {"actmat.commands", *POINTS, *(name for group in POINTS.values() for name in group)}
MODULES = {module_name(path): path for path in modules(PACKAGE)}
PACKAGES = {name.rsplit(".", n)[0] for name in MODULES for n in range(name.count(".") + 1)}
CLASSES = {name: module_name(path) for path in modules(PACKAGE) for name in type_names(tree(path))}


@cache
def imported(name: str) -> ModuleType | None:
    """The module of that name, if it is one of ours."""
    return importlib.import_module(name) if name in PACKAGES else None


def starts(first: str, module: str, package: str) -> list[Any]:
    """Things that the first part of a name may mean in a module: in it, beside it, above it; a class anywhere."""
    own = vars(importlib.import_module(module))
    above = [package.rsplit(".", n)[0] for n in range(package.count(".") + 1)]
    found = [own[first]] if first in own else []
    found += [thing for place in above if (thing := imported(f"{place}.{first}"))]
    anywhere = getattr(imported(CLASSES.get(first, "")), first, None)
    return [*found, anywhere] if anywhere else found


def has(thing: Any, parts: list[str]) -> bool:
    """True if a thing has an attribute, a module or a field for the first part, and that one for the others."""
    if not parts:
        return True
    first, *rest = parts
    if isinstance(thing, ModuleType) and imported(f"{thing.__name__}.{first}"):
        return has(imported(f"{thing.__name__}.{first}"), rest)
    if hasattr(thing, first):
        return has(getattr(thing, first), rest)
    return isinstance(thing, type) and any(
        f"self.{first}" in inspect.getsource(c) or f"    {first}: " in inspect.getsource(c)
        for c in thing.__mro__
        if c.__module__ in MODULES
    )


def stale(path: Path) -> list[str]:
    """Names in a file that begin like one of ours, and not like a variable of the file, and are none."""
    nodes = list(ast.walk(tree(path)))
    variables = {n.arg for n in nodes if isinstance(n, ast.arg)}
    variables |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    found = []
    for name in dict.fromkeys(NAME.findall(path.read_text(encoding="utf-8"))):
        first, *rest = name.split(".")
        if OTHERS.search(name) or name in ENTRIES or first in variables:
            continue
        things = [actmat] if first == "actmat" else starts(first, module_name(path), package_name(path))
        if things and not any(has(thing, rest) for thing in things):
            found.append(name)
    return found


def test_dotted_names_are_names_of_things() -> None:
    assert {str(path.relative_to(ROOT)): names for path in MODULES.values() if (names := stale(path))} == {}
