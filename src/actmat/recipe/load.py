"""Recipes from YAML files, with the line of every mistake."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from actmat.bounds import is_url, local_path, read_bytes
from actmat.checkpoints.layer_names import adapted_parts, stack_parts
from actmat.errors import RecipeError
from actmat.foreign import terminal
from actmat.recipe.output import with_output
from actmat.recipe.schema import Recipe, make_recipe
from actmat.recipe.text import UnreadableError, parse_yaml

MAX_BYTES = 1_000_000
"""Largest recipe file; reading it takes seconds."""


def make_local_recipe(
    fields: Mapping[str, Any], folder: Path, overrides: Mapping[str, Any], where: Mapping[str, str]
) -> Recipe:
    """The recipe of a file's fields, whose relative paths are relative to its folder.

    Args:
        overrides: fields that replace those of the file.
        where: dotted field path -> "file:line".

    Raises:
        RecipeError: every problem with `file:line`.
    """
    fields = with_output(_with_local_paths(fields, folder), overrides)
    return make_recipe(fields, where={k: v for k, v in where.items() if k.partition(".")[0] not in overrides})


def parse_file(path: str | Path) -> tuple[Path, dict[str, Any], dict[str, str]]:
    """The folder of a YAML file, its content, a mapping, and dotted field path -> "file:line".

    Raises:
        RecipeError: unreadable, or not YAML.
    """
    file = local_path(path, error=RecipeError)
    try:
        node, data = parse_yaml(_read(file))
    except UnreadableError as error:
        raise RecipeError(f"{file} is not valid YAML.", [f"{file}:{error.line}: {error.problem}"]) from None
    if node is None or not isinstance(data, dict):
        raise RecipeError(f"{file}: a recipe is a mapping (base: ..., experts: [...]); found {type(data).__name__}.")
    return file.parent, data, _lines(node, file)


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as YAML without defaults and `out`: readable, and can be run again.

    >>> print(recipe_yaml(make_recipe({"base": "base", "experts": ["math"], "method": "actmat"})), end="")
    base: base
    experts:
    - path: math
    method: actmat
    """
    data = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"out"})
    return printable_yaml(data)


def printable_yaml(data: Mapping[str, Any]) -> str:
    """Data as YAML; a text that is not printable stands in one line, in quotes, with escapes."""
    shown = str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))
    if shown == terminal(shown, keep="\n"):
        return shown
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100))


class _Dumper(yaml.SafeDumper):
    """Quotes texts with characters that are not printable, so that these become escapes; lists of numbers in a line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # recipes have none

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    def represent_numbers(self, data: list[Any]) -> yaml.Node:
        numbers = bool(data) and all(isinstance(v, int | float) for v in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=numbers)


_Dumper.add_representer(list, _Dumper.represent_numbers)
_Dumper.add_representer(str, _Dumper.represent_text)


def _read(file: Path) -> str:
    """Text of the file.

    Raises:
        RecipeError: missing, unreadable, too large, or not UTF-8.
    """
    try:
        content = read_bytes(file, most=MAX_BYTES, error=RecipeError)
    except RecipeError as error:
        raise RecipeError(f"Cannot read the recipe {error.sentence}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"found the byte 0x{content[error.start]:02x}, which is not UTF-8"
        raise RecipeError(f"Cannot read the recipe {file}.", [f"{file}:{line}: {problem}"]) from None


def _lines(root: yaml.Node, file: Path) -> dict[str, str]:
    """`file:line` of every dotted field path.

    Raises:
        RecipeError: a mapping has a key twice (YAML would keep the last).
    """
    where: dict[str, str] = {}
    duplicates: list[str] = []

    def visit(node: yaml.Node, path: str, line: int) -> None:
        where[path] = f"{file}:{line + 1}"
        prefix = f"{path}." if path else ""
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if key.value in seen:
                    duplicates.append(f"{file}:{key.start_mark.line + 1}: '{key.value}' is given twice")
                seen.add(key.value)
                visit(value, f"{prefix}{key.value}", key.start_mark.line)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                visit(value, f"{prefix}{i}", value.start_mark.line)

    visit(root, "", root.start_mark.line)
    if duplicates:
        raise RecipeError(f"{file} gives the same key twice.", duplicates)
    return where


def local_location(text: str, folder: Path) -> str:
    """A location as seen from here, given one that is relative to `folder`; unchanged if nothing is there."""
    parts = stack_parts(text)
    if parts and not os.path.lexists(folder / text):
        return " + ".join(str(replace(part, location=local_location(part.location, folder))) for part in parts)
    if is_url(text):
        return text
    if (pair := adapted_parts(text)) and not os.path.lexists(folder / text):
        return "+".join(local_location(part, folder) for part in pair)
    is_local = text.startswith(("./", "../")) or os.path.exists(folder / text)
    return str(folder / text) if is_local and not Path(text).is_absolute() else text


def _with_local_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields with local paths relative to `folder`; others stay unchanged, as hub ids."""

    def local(value: Any) -> Any:
        if isinstance(value, dict):  # an expert
            return {k: local(v) if k in ("path", "statistics") else v for k, v in value.items()}
        return local_location(value, folder) if isinstance(value, str) else value

    fields = dict(data)
    if fields.get("base", "") is None:
        del fields["base"]
    elif "base" in fields:
        fields["base"] = local(fields["base"])
    if isinstance(fields.get("experts"), list):
        fields["experts"] = [local(e) for e in fields["experts"]]
    out = fields.get("out")
    if isinstance(out, str) and not is_url(out):
        fields["out"] = str(folder / os.path.expanduser(out))
    return fields
