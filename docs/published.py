"""The public surface: JSON Schemas of files, and a list of all public names.

    python -m docs.published            # writes tests/house/surface.json anew: say why in CHANGELOG.md
    python -m docs.generate             # writes docs/schemas/*.json anew, with the pages

docs/limits.md says what is promised of both.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import typer
from docs.markdown import ROOT
from pydantic import TypeAdapter
from typer.models import OptionInfo

import actmat
from actmat import plugins
from actmat.cli.flags import with_flags
from actmat.cli.listing import COMMANDS, COMMON, declared_command
from actmat.cli.screen import LAYOUTS
from actmat.diagnostics import model as report
from actmat.diagnostics.model import Diagnosis
from actmat.errors import MergeError
from actmat.methods import all_methods
from actmat.methods.post import STEPS
from actmat.planning import model as plan
from actmat.recipe import Recipe
from actmat.recipe.output import KINDS
from actmat.report import manifest
from actmat.report.schema import _Adapter, _Model

SURFACE = ROOT / "tests" / "house" / "surface.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
RECIPE = 1
"""Version of the layout of recipes, which name none: a recipe of version 1 stays one."""

SHORT_TEXT = ("ExpertRef", "PostRef", "Vocabulary", "TokenRow")
"""Models that a recipe may give as a text."""
SHORT_LIST = {"Recipe": ("keep", "mute", "post"), "Rule": ("match",), "ExpertRef": ("stacks",)}
"""Model -> lists that a recipe may give as their only member."""

Schema = dict[str, Any]


# Schemas


def _inside(schema: Any) -> Iterator[Schema]:
    """All mappings in a schema."""
    if isinstance(schema, dict):
        yield schema
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _inside(value)


def _as_written(schema: Schema) -> Schema:
    """A schema that holds a `Recipe`, with the short forms that a recipe may have.

    The models take them before they validate, so that pydantic does not know them.
    """
    defs = schema["$defs"]
    fields: Mapping[str, Schema] = {**defs, "Recipe": defs.get("Recipe", schema)}
    for name, listed in SHORT_LIST.items():
        for field in listed:
            entry = fields[name]["properties"][field]
            one = {"type": "string"} if "$ref" not in entry["items"] else entry["items"]
            entry["anyOf"] = [one, {"type": entry.pop("type"), "items": entry.pop("items")}]
    for entry in list(_inside(schema)):
        if "oneOf" in entry:  # of outputs
            entry["anyOf"] = [*entry.pop("oneOf"), *entry.pop("anyOf", [])]
            entry.pop("discriminator", None)
    recipe = fields["Recipe"]["properties"]
    recipe["output"]["anyOf"].append({"type": "string"})
    for name in SHORT_TEXT:
        defs[name] = {"anyOf": [{"type": "string"}, defs[name]]}
    return schema


def _with_public_names(schema: Any) -> Any:
    """Without the underscores of private models, and without titles that repeat a field's name."""
    if isinstance(schema, list):
        return [_with_public_names(v) for v in schema]
    if isinstance(schema, str):
        return re.sub(r"^#/\$defs/_", "#/$defs/", schema)
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if k != "title" or not isinstance(v, str)}
    return {k.lstrip("_") if k.startswith("_") else k: _with_public_names(v) for k, v in kept.items()}


def recipe_schema() -> Schema:
    """Schema of a recipe, as people write it."""
    return _as_written(Recipe.model_json_schema())


def plan_schema() -> Schema:
    """Schema of `actmat plan --json --full`."""
    found = _as_written(plan.PLAN.json_schema())
    found["properties"] |= {"actmat_plan": {"const": plan.FORMAT}}
    found["required"] = ["actmat_plan", *found["required"]]
    return found


def manifest_schema() -> Schema:
    """Schema of `actmat_manifest.json`; a reader ignores fields that it does not know."""
    found = TypeAdapter(_Model | _Adapter).json_schema()
    mark = {"properties": {"actmat_manifest": {"const": manifest.FORMAT}}, "required": ["actmat_manifest"]}
    return {**found, "type": "object", **mark}


def report_schema() -> Schema:
    """Schema of `report.json`."""
    found = TypeAdapter(Diagnosis).json_schema()
    return {**found, "required": ["format", "kind", *found["required"]]}


FILES: Mapping[str, tuple[int, Callable[[], Schema], str]] = {
    "recipe": (RECIPE, recipe_schema, "A recipe of actmat: YAML or JSON, see docs/formats/recipe.md"),
    "plan": (plan.FORMAT, plan_schema, "What `actmat plan --json --full` prints, see docs/formats/plan.md"),
    "manifest": (manifest.FORMAT, manifest_schema, "actmat_manifest.json, see docs/formats/manifest.md"),
    "report": (report.FORMAT, report_schema, "report.json, see docs/formats/report.md"),
}
"""Kind of file -> version, schema, title."""


def published(kind: str) -> str:
    """The text of a schema's file."""
    version, made, title = FILES[kind]
    head = {"$schema": DIALECT, "$id": f"urn:actmat:{kind}:{version}", "title": title}
    return json.dumps(head | _with_public_names(made()), indent=1, ensure_ascii=False) + "\n"


WRITTEN = {
    ROOT / "docs" / "schemas" / f"{kind}-{version}.json": partial(published, kind)
    for kind, (version, *_) in FILES.items()
}
"""File -> its text."""


# Names


def signature(thing: Any) -> str:
    """Parameters and result of a function; of a class its fields and public members; of an error its exit code."""
    if not isinstance(thing, type):
        return _call(thing)
    if issubclass(thing, MergeError):
        return f"error, exit code {thing.exit_code}"
    fields = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    members = [n for n in vars(thing) if not n.startswith("_") and n not in fields]
    return f"class: {', '.join([*fields, *sorted(members)])}"


def _call(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults of parameters, without types: a wider type breaks no caller."""
    shown = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    shown = [p if p.default is p.empty else p.replace(default=_Shown(p.default)) for p in shown]
    return str(inspect.Signature(shown))


class _Shown:
    """A default that is shown alike by all versions of Python."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return getattr(self.value, "__name__", None) or repr(self.value)


def spellings(parameter: inspect.Parameter) -> list[str]:
    """All spellings of a flag or an argument."""
    info = typing.get_args(parameter.annotation)[1]
    if not isinstance(info, OptionInfo):
        return [info.metavar or parameter.name.upper()]
    # typer keeps the first spelling of an Annotated option where a default would stand
    named = [d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str)]
    return [s for d in named or [f"--{parameter.name.replace('_', '-')}"] for s in d.split("/")]


def _flags(command: Any) -> list[str]:
    """All spellings of the flags and arguments of a command."""
    made = with_flags(command)
    listed = [s for p in inspect.signature(made, eval_str=True).parameters.values() for s in spellings(p)]
    return listed + [f"--set {name}" for name in vars(made).get("settings", ())]


def surface() -> dict[str, Any]:
    """Everything that docs/limits.md calls public, of this distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]
    listed = actmat.__all__
    commands: dict[str, list[str]] = {}
    for name in (*COMMANDS, *points.get("actmat.commands", ())):
        declared = declared_command(name)
        if isinstance(declared, typer.Typer):
            commands |= {f"{name} {c.name or c.callback.__name__}": _flags(c.callback)
                         for c in declared.registered_commands if c.callback}  # fmt: skip
        else:
            commands[name] = _flags(declared)
    groups = re.findall(r"^(actmat\.\w+)  ?", plugins.__doc__ or "", re.MULTILINE)
    return {
        "python": {n: signature(getattr(actmat, n)) for n in sorted(listed) if n != "__version__"},
        "commands": dict(sorted(commands.items())),
        "exit codes": sorted({0, 1, *COMMON}),
        "json of commands": dict(sorted(LAYOUTS.items())),
        "files": {kind: version for kind, (version, *_) in FILES.items()},
        "entry points": {group: sorted(points.get(group, ())) for group in sorted(groups)},
        "methods": {m.name: sorted(m.options) for m in sorted(all_methods(), key=attrgetter("name"))},
        "post": {s.name: sorted(s.options) for s in STEPS.values()},
        "kinds of output": sorted(KINDS),
        "extras": sorted(project["optional-dependencies"]),
    }


def main() -> None:
    """Write the list of public names."""
    SURFACE.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
    print(f"{SURFACE.relative_to(ROOT)}: {sum(map(len, surface().values()))} entries")


if __name__ == "__main__":
    main()
