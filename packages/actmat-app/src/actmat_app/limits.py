"""Limits of a page served to others: locations, fields, and sizes. Local use has no limits."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actmat.errors import CheckpointError, Problems, RecipeError, format_size

if TYPE_CHECKING:
    from actmat.planning import MergePlan

PREFIX = "ACTMAT_APP_"
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
PLACE = re.compile(rf"(?:https://huggingface\.co/|hf://)?(?P<repo>{NAME}/{NAME})(?:@(?P<revision>[A-Za-z0-9_./-]+))?")
"""Pattern of a hub repository."""

FIELDS = {
    *("base", "experts", "method", "options", "normalize", "scale", "scope", "rules", "keep", "space", "post"),
    *("dtype", "compute_dtype", "seed", "output", "to", "rank"),
}
"""Recipe fields that visitors may set: except for base and experts, none contains a location or a run setting."""

EXPERT_FIELDS = {"path", "name", "weight", "options"}
"""Expert fields that visitors may set."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
"""Suffixes of weight files."""


def repository_of(place: Any) -> tuple[str, str | None]:
    """Name and revision of a hub repository.

    >>> repository_of("hf://org/math@v2")
    ('org/math', 'v2')

    Raises:
        RecipeError: the location is not a hub repository.
    """
    match = PLACE.fullmatch(str(place).strip())
    if match is None or ".." in str(place):
        raise RecipeError(f"expected a hub repository, org/name or org/name@revision, found '{str(place)[:200]}'")
    return match["repo"], match["revision"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one visitor's job, and of stored outputs.

    Args:
        max_bytes: maximum size of all inputs of a merge, and of its output.
        max_experts: maximum number of experts.
        seconds: time limit of a plan, a merge or a push, after which it is stopped.
        keep: maximum number of merged models on the disk; the oldest is removed first.
    """

    max_bytes: int = 2_000_000_000
    max_experts: int = 8
    seconds: int = 900
    keep: int = 8

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Limits:
        """Limits from variables such as `ACTMAT_APP_MAX_BYTES`, else the defaults.

        >>> Limits.from_environment({"ACTMAT_APP_MAX_BYTES": "500MB"}).max_bytes
        500000000

        Raises:
            RecipeError: lists every variable that is unknown or whose value is invalid.
        """
        from actmat.checkpoints.writing.shards import parse_size  # imports torch

        known = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls)}
        problems, found = Problems(), {}
        for key, text in environment.items():
            with problems.noted():
                if key in known:
                    found[known[key]] = parse_size(text)
                elif key.startswith(PREFIX):
                    raise RecipeError(f"Unknown limit {key}. Limits: {', '.join(known)}.")
        problems.check()
        return cls(**found)

    def pinned(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Check a visitor's fields against the limits, and pin repositories to commits.

        Raises:
            MergeError: lists forbidden fields and locations, or the files are too large.
        """
        from actmat.checkpoints.side_files import sort_side_files
        from actmat.extras.remote.hub import open_repository  # imports torch

        given, problems, found, sizes = fields["experts"], Problems(), {}, {}
        if not isinstance(given, list) or not 1 <= len(given) <= self.max_experts:
            raise RecipeError(f"Expected 1 to {self.max_experts} experts, one per line.")
        experts = [dict(e) if isinstance(e, Mapping) else {"path": e} for e in given]
        unknown = {*fields} - FIELDS | {name for e in experts for name in e} - EXPERT_FIELDS
        problems.found += [RecipeError(f"{n}: visitors of this page cannot set this field") for n in sorted(unknown)]
        for place in [*filter(None, [fields.get("base")]), *(e.get("path") for e in experts)]:
            with problems.noted():
                opened = open_repository(*repository_of(place))
                found[place] = opened.address
                files = {name: file.size for name, file in opened.files.items()}
                copied = sort_side_files(files).kept
                sizes[place] = sum(size for n, size in files.items() if n.endswith(WEIGHTS) or n in copied)
        problems.check()
        if sum(sizes.values()) > self.max_bytes:
            raise CheckpointError(
                f"The repositories hold files of {format_size(sum(sizes.values()))}, more than this page allows, "
                f"{format_size(self.max_bytes)}. Nothing was downloaded. Fix: smaller inputs, or a page of your own.",
                [f"{place}: {format_size(size)}" for place, size in sizes.items()],
            )
        base = found[fields["base"]] if fields.get("base") else ""
        return {**fields, "base": base, "experts": [e | {"path": found[e["path"]]} for e in experts]}

    def check_plan(self, plan: MergePlan) -> None:
        """Raise for a merge that reads other formats than safetensors, or writes too much.

        Raises:
            MergeError: a limit is exceeded.
        """
        read = [f.path for given in plan.inputs for f in given.files if not f.path.endswith(".safetensors")]
        if read:
            raise CheckpointError(f"This page reads safetensors only, found {read[0]}. "
                                  "Fix: save the model again with safe_serialization=True.")  # fmt: skip
        if plan.write_bytes > self.max_bytes:
            raise RecipeError(
                f"The merged model would have {format_size(plan.write_bytes)}, more than this page allows, "
                f"{format_size(self.max_bytes)}. Fix: a smaller rank."
            )
