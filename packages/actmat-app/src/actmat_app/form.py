"""The fields of the page as arguments of `actmat.plan` and `actmat.merge`."""

from __future__ import annotations

import itertools
import os
from typing import Any

from actmat.cli.flags import experts_of
from actmat.errors import RecipeError
from actmat.recipe.experts import ExpertRef
from actmat.recipe.text import UnreadableError, parse_yaml

LONGEST = 20_000
"""Maximum number of characters in all fields together."""

AUTOMATIC, MODEL, ADAPTER, FILE = "Automatic", "Model", "Adapter", "Single file"
KINDS = (AUTOMATIC, MODEL, ADAPTER, FILE)
"""Kinds of output; automatic: a model if there is a base, else an adapter."""

SUFFIX = ".safetensors"


MARKS = {"config.json", "adapter_config.json", "model_index.json"}
"""Files of which a folder of a model has one."""
FILES = (SUFFIX, ".gguf")
"""Ends of files that are models of their own, in other folders."""
DEEPEST = 4
"""Folders below each other in which models are looked for."""
MOST_FOLDERS = 2000
"""Folders that are looked at."""


def find_models(root: str) -> list[str]:
    """Places of models below a folder, relative to it, without what is hidden or deep."""
    places: list[str] = []
    for folder, names, files in itertools.islice(os.walk(root), MOST_FOLDERS):
        place = os.path.relpath(folder, root)
        names[:] = sorted(n for n in names if n[0] != "." and place.count(os.sep) < DEEPEST - 1)
        if MARKS & {*files}:
            places.append(place)
        else:
            places += [os.path.normpath(os.path.join(place, f)) for f in sorted(files) if f.endswith(FILES)]
    return places


def recipe_fields(
    base: str | None, kind: str, method: str, scale: float, rank: float, more: str | None, *rows: str | float | None
) -> dict[str, Any]:
    r"""Arguments of `actmat.plan`. Fields that the page has not shown yet are None.

    >>> fields = recipe_fields("base", "Adapter", "auto", 1, 0, "seed: 1", "math", 0.7, "", "c=my code", 1, "x =\ny")
    >>> fields["experts"], fields["data"], fields["to"]
    ([{'path': 'math', 'weight': 0.7}, {'path': 'my code', 'name': 'c'}], {'c': ['x =', 'y']}, 'adapter')

    Args:
        base: location; empty: adapters are merged into an adapter.
        kind: one of `KINDS`.
        method: a method, or auto.
        scale: factor of the merged delta.
        rank: rank of an adapter to write; 0: the rank of the inputs.
        more: YAML with other recipe fields or run settings, which take precedence.
        rows: of each expert its location, possibly with `NAME=` before it, its weight (1: not given), and its prompts,
            one per line, or a file with prompts.

    Raises:
        RecipeError: a field is too long, or is not YAML; or prompts for a single file.
    """
    if sum(len(text) for text in (base, more, *rows) if isinstance(text, str)) > LONGEST:
        raise RecipeError(f"The form is too long: expected at most {LONGEST} characters.")
    try:
        added = parse_yaml(more or "")[1] or {}
    except UnreadableError as error:
        raise RecipeError(f"Field 'More' is not valid YAML: {error}") from None
    if not isinstance(added, dict):
        raise RecipeError(f"Field 'More': expected YAML such as 'dtype: bfloat16', found {type(added).__name__}.")
    fields: dict[str, Any] = {"base": (base or "").strip(), "experts": [], "method": method, "scale": scale}
    data = {}
    for place, weight, prompts in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        if not (place := str(place or "").strip()):
            continue
        (expert,) = experts_of([place], None if weight in (None, 1) else [float(weight)])
        fields["experts"].append(expert)
        if lines := [line.strip() for line in str(prompts or "").splitlines() if line.strip()]:
            data[ExpertRef(**expert).label] = lines if len(lines) > 1 else lines[0]
    if data and kind == FILE:
        raise RecipeError("A merge by prompts runs from its folder, found Single file. Fix: Automatic, or no prompts.")
    fields |= {"data": data} if data else {}
    if "output" not in added and (kind in (MODEL, ADAPTER) or rank):
        fields |= {"to": MODEL.lower() if kind == MODEL else ADAPTER.lower()} | ({"rank": rank} if rank else {})
    return fields | added


def output_place(out: str | None, kind: str) -> str:
    """Location to write: a single file gets its suffix.

    >>> output_place(" merged ", "Single file"), output_place("merged", "Automatic")
    ('merged.safetensors', 'merged')

    Raises:
        RecipeError: no location.
    """
    if not (out := (out or "").strip()):
        raise RecipeError("No output given. Fix: fill in the field 'Output'.")
    return f"{out.removesuffix(SUFFIX)}{SUFFIX}" if kind == FILE else out
