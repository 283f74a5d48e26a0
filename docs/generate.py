"""Fill the parts of the pages that follow from the declarations in the code.

    python -m docs.generate             # writes every page and the JSON Schemas anew
    python -m docs.generate --check     # exit status 1 when a page is not what the code says
    python -m docs.generate --pictures  # also takes the pictures anew, by Chromium

Kinds of parts (`docs/markdown.py` has the marks): `methods` (the overview table), `method NAME`, `steps`, `step NAME`,
`flags COMMAND`, `exit-codes`, `recipe MODEL`, `outputs` (fields of all kinds of output),
`exits`, `families`, `api`.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from docs import markdown
from docs.markdown import table
from docs.published import WRITTEN as SCHEMA_FILES
from docs.published import spellings
from docs.reference import api
from pydantic import BaseModel
from typer.models import ArgumentInfo

from actmat.cli.flags import with_flags
from actmat.cli.listing import COMMANDS, COMMON, DISTRIBUTIONS, declared_command, info_of
from actmat.errors import MergeError
from actmat.layout.families import FAMILIES
from actmat.methods import Bounds, MergeMethod, Option, all_methods, get_method
from actmat.methods.contract import Description
from actmat.methods.post import STEPS
from actmat.recipe import ExpertRef, PostRef, Recipe, RoleRule, Rule
from actmat.recipe.output import KINDS as OUTPUTS
from actmat.recipe.values import Entry
from actmat.recipe.vocabulary import TokenRow, Vocabulary

SCHEMAS = (Recipe, ExpertRef, Entry, Rule, RoleRule, PostRef, *OUTPUTS.values(), Vocabulary, TokenRow)
MODELS: dict[str, type[BaseModel]] = {m.__name__: m for m in SCHEMAS}
# Methods


def methods(_: str) -> str:
    """What every method needs, does and costs."""
    rows = [[f"[`{m.name}`]({m.name}.md)", m.text.summary, *_facts(m)] for m in all_methods()]
    return table(["method", "idea", "data", "LoRA", "weights", "random", "acts on", "GFLOP"], rows)


SIDE, EXPERTS = 4096, 4
"""The layer and the number of experts for which costs are shown."""


def _gflop(m: MergeMethod) -> str:
    """Rough cost of a method on this layer, with fewer experts for methods that take fewer."""
    experts = min(EXPERTS, m.max_experts or EXPERTS)
    gflop = round(m.cost.operations((SIDE, SIDE), experts, m.resolve_options({})) / 1e9, 3)
    return f"{float(f'{gflop:.3g}'):,.0f}" if gflop >= 100 else f"{gflop:.3g}"


def _facts(m: MergeMethod) -> list[str]:
    acts = {"matrix": "matrices", "tensor": "tensors", "elementwise": "entries"}[m.acts_on]
    needs, exact, random = ", ".join(m.needs_statistics), "exact" * bool(m.lowrank), "yes" * m.is_random
    return [needs, exact, _weights(m), random, acts, _gflop(m)]


def _weights(m: MergeMethod) -> str:
    obeyed = "where row spaces overlap" if m.meets_all(m.resolve_options({})) else "yes"
    return obeyed if m.is_weighted else ""


def method(name: str) -> str:
    """Facts and options of one method."""
    m = get_method(name)
    acts = {
        "matrix": "logical matrices `O x I`",
        "tensor": "whole tensors of any shape",
        "elementwise": "single entries, tensors of any shape",
    }[m.acts_on]
    needs = [f"statistics ({', '.join(m.needs_statistics)})"] if m.needs_statistics else []
    needs += ["the base weights"] if m.needs_base else []
    passes = "one expert at a time" if m.access.one_pass else "all experts of a tensor together"
    if m.survey is not None:
        passes += "; some options want a first pass over the whole model"
    facts = [
        ["acts on", acts],
        ["needs beside the deltas", ", ".join(needs) or "nothing"],
        ["weights of experts", _weights(m) or "no"],
        ["random", "yes, seeded by the tensor's name" if m.is_random else "no"],
        ["low-rank deltas", "exact, in factored form" if m.lowrank else "as dense matrices"],
        ["operations", f"{_gflop(m)} GFLOP {_measured_on(m)}"],
        ["holds", passes],
        ["laws (tested)", ", ".join(law.replace("_", " ") for law in sorted(m.laws)) or "none"],
    ]
    if m.max_experts is not None:
        facts.insert(2, ["experts", f"at most {m.max_experts}"])
    if m.preset_of:
        facts.append(["preset of", f"[`{m.preset_of}`]({m.preset_of}.md)"])
    options = _options(m.options.values()) if m.options else "It has no options.\n"
    return _described(m.text, [table([f"`{m.name}`", ""], facts), options])


def _described(text: Description, tables: list[str]) -> str:
    """The description of a method or a step, its tables and its source."""
    equation = "\n".join(f"    {line}" for line in text.equation.splitlines())
    parts = [text.summary, equation, text.notes, *tables, f"Source: {text.source}"]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _options(options: Iterable[Option]) -> str:
    rows = []
    for option in options:
        bounds = f", {_bounds(option.bounds)}" if option.bounds else ""
        shown = f'"{option.default}"' if isinstance(option.default, str) else str(option.default)
        rows.append([f"`{option.name}`", f"`{option.type_name}`{bounds}", f"`{shown}`", option.doc])
    return table(["option", "type", "default", "meaning"], rows)


def steps(_: str) -> str:
    """Every step of post-processing."""
    rows = [[f"[`{s.name}`]({s.name}.md)", s.text.summary, "exact"] for s in STEPS.values()]
    return table(["step", "idea", "low-rank deltas"], rows)


def step(name: str) -> str:
    """Description and options of one step."""
    s = STEPS[name]
    return _described(s.text, [_options(s.options.values())] if s.options else [])


def _bounds(bounds: Bounds) -> str:
    if bounds.high is None:
        return f"{'>' if bounds.open_low else '>='} {bounds.low:g}"
    return f"in {bounds}"


def _measured_on(m: MergeMethod) -> str:
    """Words for the layer and the experts of the costs."""
    experts = min(EXPERTS, m.max_experts or EXPERTS)
    return f"for {experts} {'expert' if experts == 1 else 'experts'} of {SIDE} x {SIDE}"


# Commands


def flags(name: str) -> str:
    """Arguments and flags of one command, from its signature; those that are as for `merge` by name only."""
    rows, merge = _flags(name), _flags("merge") if name != "merge" else {}
    shared = [p for p, row in rows.items() if merge.get(p) == row]
    settings = {f"`{field}`": _meaning(text) for field, text in _settings(name).items()}
    for field, text in (_settings("merge") if name != "merge" else {}).items():
        if settings.get(f"`{field}`") == _meaning(text):
            del settings[f"`{field}`"]
    text = table(["flag", "default", "meaning"], [row for p, row in rows.items() if p not in shared])
    if shared:
        listed = ", ".join(rows[p][0].split(" ")[0].rstrip(",") for p in shared)
        text += f"\nAs for [`merge`](merge.md#flags): {listed}.\n"
    if settings:
        text += "\n" + table(["for `--set`", "default", "meaning"], [[f, *cells] for f, cells in settings.items()])
    return text


def _settings(name: str) -> dict[str, str]:
    """Fields that --set takes, but those of a recipe: name -> help."""
    of_recipe = {*ExpertRef.model_fields, *Recipe.model_fields}.union(*(kind.model_fields for kind in OUTPUTS.values()))
    settings: dict[str, str] = vars(with_flags(declared_command(name))).get("settings", {})
    return {field: text for field, text in settings.items() if field not in of_recipe - {"executor"}}


def _meaning(text: str) -> tuple[str, str]:
    """Default and meaning in the help of a flag or a setting."""
    found = re.search(r"\s*\(default: (.*?)\)", text)
    return (f"`{found[1]}`", text.replace(found[0], "")) if found else ("", text)


def _flags(name: str) -> dict[str, list[str]]:
    """Parameters of one command: name -> its spellings, default and meaning."""
    rows = {}
    for parameter in inspect.signature(with_flags(declared_command(name)), eval_str=True).parameters.values():
        kind, info = typing.get_args(parameter.annotation)[:2]
        spelled = [f"`{s}`" for s in spellings(parameter)]
        is_flag, many = bool in (kind, *typing.get_args(kind)), "list[" in str(kind)
        if not is_flag and not isinstance(info, ArgumentInfo):
            words = {"float": "number", "int": "number", "Path": "path", "str": "text", "Literal": "text"}
            spelled[-1] += " " + next(word for name, word in words.items() if name in str(kind))
        default = "" if parameter.default in (None, False, inspect.Parameter.empty) else str(parameter.default)
        if is_flag:
            default = spelled[0].strip("`") if parameter.default else ""
        stated, text = _meaning(info.help or "")
        stated = stated or (default and f"`{default}`")
        rows[parameter.name] = [", ".join(spelled), stated, text + (" Repeatable." if many else "")]
    return rows


def exits(_: str) -> str:
    """Exit codes and the errors behind them."""
    rows = [
        [f"`{e.__name__}`", str(e.exit_code), (e.__doc__ or "").splitlines()[0]] for e in MergeError.__subclasses__()
    ]
    return table(["error", "exit code", "meaning"], rows)


def exit_codes(_: str) -> str:
    """Exit codes of every command, and those that all share."""
    names = sorted({*COMMANDS, *DISTRIBUTIONS})
    rows = [[f"`{name}`", *(info_of(declared_command(name)).exits[code] for code in (0, 1))] for name in names]
    shared = [[str(code), meaning] for code, meaning in COMMON.items()]
    return table(["command", "0", "1"], rows) + "\n" + table(["exit code", "of all commands"], shared)


# Recipes and layouts


def recipe(name: str) -> str:
    """Fields of one model of the recipe's schema."""
    return table(["field", "type", "default", "meaning"], list(_fields(MODELS[name]).values()))


def outputs(_: str) -> str:
    """Fields of every kind of output, each described once."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind, model in OUTPUTS.items():
        for field, row in _fields(model).items():
            if field != "kind":
                kinds.setdefault(tuple(row), []).append(f"`{kind}`")
    rows = [[row[0], ", ".join(takers), *row[1:]] for row, takers in kinds.items()]
    return table(["field", "kind", "type", "default", "meaning"], rows)


def _fields(model: type[BaseModel]) -> dict[str, list[str]]:
    """Fields of a model: name -> name, type, default and meaning as cells."""
    schema = model.model_json_schema()
    rows = {}
    for field, entry in schema["properties"].items():
        default = "required" if field in schema.get("required", []) else f"`{_default(entry)}`"
        rows[field] = [f"`{field}`", f"`{_type(entry)}`", default, entry.get("description", "")]
    return rows


def _type(entry: dict[str, Any]) -> str:
    if "$ref" in entry:
        return str(entry["$ref"]).rpartition("/")[2]
    if choices := entry.get("anyOf") or entry.get("oneOf"):
        return " | ".join(_type(e) for e in choices)
    if "enum" in entry:
        return " | ".join(f'"{v}"' for v in entry["enum"])
    if "const" in entry:
        return str(entry["const"]).lower() if isinstance(entry["const"], bool) else f'"{entry["const"]}"'
    if entry.get("type") == "array":
        if "prefixItems" in entry:
            return "[" + ", ".join(_type(e) for e in entry["prefixItems"]) + "]"
        return f"list of {_type(entry['items'])}"
    names = {"string": "text", "object": "mapping", "boolean": "true | false"}
    return names.get(entry.get("type", ""), entry.get("type", "anything"))


def _default(entry: dict[str, Any]) -> str:
    value = entry.get("default", {} if entry.get("type") == "object" else None)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[]"
    return "{}" if isinstance(value, dict) else str(value) or '""'


KINDS: markdown.Kinds = {
    "methods": methods,
    "method": method,
    "steps": steps,
    "step": step,
    "flags": flags,
    "exits": exits,
    "exit-codes": exit_codes,
    "recipe": recipe,
    "outputs": outputs,
    "families": lambda _: ", ".join(f"`{f}`" for f in sorted(FAMILIES, key=str.lower)) + ".\n",
    "api": api,
}


WRITTEN: dict[Path, Callable[[], str]] = SCHEMA_FILES
"""Whole files that are made from declarations and pages."""


def main() -> None:
    """Command line."""
    if "--pictures" in sys.argv:
        from docs.pictures import take

        sys.argv.remove("--pictures")
        take()
    markdown.main(__doc__ or "", KINDS, WRITTEN)


if __name__ == "__main__":
    main()
