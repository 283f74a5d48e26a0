"""Plans in files, written and read in one pass: a second for 100,000 tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from actmat.bounds import read_bytes
from actmat.errors import RecipeError
from actmat.planning.model import FORMAT, PLAN, MergePlan, plan_problems

MAX_FILE_BYTES = 4_000_000_000
"""Largest plan that is read from a file: one of 100,000 tensors takes 100 MB."""


def write_plan(plan: MergePlan, path: Path) -> None:
    """Write the JSON of `MergePlan.to_json`, without totals.

    Raises:
        OSError: the disk.
    """
    text = PLAN.dump_json(plan, exclude_defaults=True)
    if not all(map(_is_finite, {id(i.call): i.call.options for i in plan.items if i.call is not None}.values())):
        fields = PLAN.dump_python(plan, exclude_defaults=True)  # pydantic's own JSON has null for them
        text = json.dumps(fields, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(b'{"actmat_plan":%d,' % FORMAT)
        file.write(memoryview(text)[1:])


def read_plan(path: Path) -> MergePlan:
    """The plan that `write_plan` wrote.

    Raises:
        RecipeError: it cannot be read, or is none of this version.
    """
    text = read_bytes(path, most=MAX_FILE_BYTES, error=RecipeError)
    start = b'{"actmat_plan":%d,' % FORMAT
    if not text.startswith(start):
        raise RecipeError(f"{path}: expected a plan of layout {FORMAT}, found other text")
    try:
        return PLAN.validate_json(b"{" + memoryview(text)[len(start) :])
    except ValidationError as error:
        raise RecipeError(f"{path}: the plan is damaged.", plan_problems(error)) from None


def _is_finite(value: Any) -> bool:
    """True if no number in an option's value is infinite or NaN."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
