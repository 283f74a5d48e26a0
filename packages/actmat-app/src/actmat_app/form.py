"""The fields of the page as arguments of `actmat.plan` and `actmat.merge`."""

from __future__ import annotations

from typing import Any

from actmat.cli.flags import experts_of
from actmat.errors import RecipeError
from actmat.recipe.text import UnreadableError, parse_yaml

LONGEST = 20_000
"""Maximum number of characters in all fields together."""


def recipe_fields(
    base: str, experts: str, method: str, scale: float, rank: float, more: str, inputs: str = ""
) -> dict[str, Any]:
    r"""Arguments of `actmat.plan`.

    >>> recipe_fields("base", "math 0.7\nc=my code", "auto", 1, 0, "seed: 1")["experts"]
    [{'path': 'math', 'weight': 0.7}, {'path': 'my code', 'name': 'c'}]

    Args:
        base: location; empty: adapters are merged into an adapter.
        experts: one location per line, optionally with `NAME=` before it and a weight after it.
        method: a method, or auto.
        scale: factor of the merged delta.
        rank: rank of an adapter to write; 0: the rank of the inputs.
        more: YAML with other recipe fields or run settings, which take precedence.
        inputs: inputs of each expert by its name, one per line: `NAME=` and a prompt or a file.

    Raises:
        RecipeError: a field is too long, or is not YAML.
    """
    if len(base) + len(experts) + len(more) + len(inputs) > LONGEST:
        raise RecipeError(f"The form is too long: expected at most {LONGEST} characters.")
    try:
        added = parse_yaml(more)[1] or {}
    except UnreadableError as error:
        raise RecipeError(f"Field 'More' is not valid YAML: {error}") from None
    if not isinstance(added, dict):
        raise RecipeError(f"Field 'More': expected YAML such as 'dtype: bfloat16', found {type(added).__name__}.")
    lines = filter(None, map(str.strip, experts.splitlines()))
    fields = {"base": base.strip(), "experts": [_expert(line) for line in lines], "method": method, "scale": scale}
    kind = "extracted" if fields["base"] else "adapter"
    data = dict(line.partition("=")[::2] for line in filter(None, map(str.strip, inputs.splitlines())))
    if wrong := [name for name, given in data.items() if not given]:
        raise RecipeError(f"Field 'Inputs': expected NAME=INPUTS, found '{wrong[0][:200]}'. Fix: one expert per line.")
    fields |= {"data": data} if data else {}
    return fields | ({"output": {"kind": kind, "rank": rank}} if rank else {}) | added


def _expert(line: str) -> dict[str, Any]:
    """Parse one line into an expert."""
    place, _, last = line.rpartition(" ")
    try:
        (found,) = experts_of([place.strip()], [float(last)]) if place else experts_of([line], None)
    except ValueError:
        (found,) = experts_of([line], None)
    return found
