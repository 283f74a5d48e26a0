"""The public functions and classes as a page, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import actmat

WIDTH = 80


def api(_: str) -> str:
    """Every public name of `actmat`: functions, then classes, then errors."""
    named = {n: getattr(actmat, n) for n in actmat.__all__ if not n.startswith("__")}
    errors = [n for n, x in named.items() if isinstance(x, type) and issubclass(x, Exception)]
    classes = [n for n, x in named.items() if isinstance(x, type) and n not in errors]
    functions = [n for n in named if n not in errors and n not in classes]
    parts = ["## Functions", *(_entry(n, named[n]) for n in functions)]
    parts += ["## Classes", *(_entry(n, named[n]) for n in classes)]
    parts += ["## Errors", *(f"**`actmat.{n}`**: {_first(named[n])}" for n in errors)]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, thing: Any) -> str:
    lines = [f"### `actmat.{name}`", textwrap.indent(f"{_signature(name, thing)}\n\n{inspect.getdoc(thing)}", "    ")]
    if isinstance(thing, type):
        members = [(n, m) for n, m in vars(thing).items() if not n.startswith("_")]
        lines += [f"* **`.{n}`**: {_first(m)}" for n, m in members if _is_documented(m)]
    return "\n\n".join(line for line in lines if line)


def _is_documented(member: Any) -> bool:
    return isinstance(member, property | classmethod) or inspect.isfunction(member) or hasattr(member, "attrname")


def _first(thing: Any) -> str:
    """First sentence of a docstring, in one line."""
    inner = getattr(thing, "__func__", getattr(thing, "func", thing))
    return " ".join((inspect.getdoc(inner) or "").split("\n\n")[0].split())


def _signature(name: str, thing: Callable[..., Any]) -> str:
    """The call, a parameter per line if it does not fit on one; defaults that are functions by their names."""
    signature = inspect.signature(thing)
    shown, starred = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        kind = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
        value = "" if p.default is p.empty else f" = {getattr(p.default, '__name__', repr(p.default))}"
        shown.append({p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name + kind + value)
    made = signature.return_annotation
    result = "" if made in (signature.empty, None, "None") else f" -> {_type(made)}"
    return _folded(name, shown, result)


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _folded(name: str, parameters: list[str], result: str) -> str:
    line = f"actmat.{name}({', '.join(parameters)}){result}"
    if len(line) <= WIDTH:
        return line
    inner = "".join(f"    {p},\n" for p in parameters)
    return f"actmat.{name}(\n{inner}){result}"
