"""Limits of a space, set by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from actmat.checkpoints.writing.shards import parse_size
from actmat.errors import RecipeError

PREFIX = "ACTMAT_SPACE_"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one job, and of all that a space keeps.

    Args:
        max_bytes: of all adapters of a merge, and of its output.
        max_tensors: of all adapters of a merge.
        max_adapters: of a merge.
        seconds: of a plan, a merge or a push; a job is stopped then.
        keep_seconds: time for which a merged adapter can be downloaded and pushed.
        keep: merged adapters that lie on the disk at most; the oldest goes first.
        max_memory: of a merge, as `--max-memory` takes it; empty: nine tenths of the free memory.
        queue: visitors that may wait.
    """

    max_bytes: int = 2_000_000_000
    max_tensors: int = 20_000
    max_adapters: int = 8
    seconds: int = 900
    keep_seconds: int = 3600
    keep: int = 8
    max_memory: str = ""
    queue: int = 20

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Limits:
        """The limits that `ACTMAT_SPACE_MAX_BYTES`, `ACTMAT_SPACE_SECONDS`, ... set; the default of all others.

        >>> Limits.from_environment({"ACTMAT_SPACE_MAX_BYTES": "500MB"}).max_bytes
        500000000

        Raises:
            RecipeError: a variable that is unknown, or whose value does not fit; lists all of them.
        """
        given = os.environ if environment is None else environment
        found: dict[str, int | str] = {}
        problems = []
        for key, text in given.items():
            name = key.removeprefix(PREFIX).lower()
            if not key.startswith(PREFIX):
                continue
            if name not in cls.__slots__:
                known = ", ".join(PREFIX + n.upper() for n in cls.__slots__)
                problems.append(f"{key}: expected one of {known}, found another name")
                continue
            try:
                found[name] = _value(name, text)
            except RecipeError as error:
                problems.append(f"{key}: {error.headline}")
        if problems:
            raise RecipeError("The limits in the environment are not valid.", problems)
        return cls(**found)  # type: ignore[arg-type]


def _value(name: str, text: str) -> int | str:
    if name in ("max_bytes", "max_memory"):
        size = parse_size(text)
        return size if name == "max_bytes" else text
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:10]) < 10**9:
        raise RecipeError(f"expected a whole number from 1 to 999999999, found '{text[:40]}'")
    return int(text)
