"""Files of the inputs' folders that do not go with the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actmat.checkpoints.base import Checkpoint
from actmat.experts.base import Expert
from actmat.recipe import Recipe

__all__ = ["files_left_out", "left_out_note"]

SHOWN = 8
"""Files that a note names."""
UNSAID = ("hidden", "written anew")
"""Reasons that need no note: nobody looks for such files in an output."""


def files_left_out(recipe: Recipe, base: Checkpoint | None, experts: Sequence[Expert]) -> dict[str, str]:
    """Path -> reason, for the base's folder and that of the expert that `files_from` names (its label in brackets)."""
    if base is None:
        return {}
    found = dict(base.side_files().left_out)
    if recipe.model.files_of in recipe.labels:
        expert = experts[recipe.labels.index(recipe.model.files_of)]
        found |= {f"{path} ({recipe.model.files_of})": why for path, why in expert.side_files().left_out.items()}
    return found


def left_out_note(left_out: Mapping[str, str]) -> list[str]:
    """One sentence on them; none where there is nothing to say.

    >>> left_out_note({"optimizer.pt": "a pickle", ".git/": "hidden"})
    ['not copied with the output: optimizer.pt (a pickle)']
    """
    told = [f"{path} ({why})" for path, why in left_out.items() if why not in UNSAID]
    more = [f"and {len(told) - SHOWN} more, see the manifest"] if len(told) > SHOWN else []
    return [f"not copied with the output: {', '.join(told[:SHOWN] + more)}"] if told else []
