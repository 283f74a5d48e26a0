"""The chosen merge as a recipe that needs no data, and what there is to say about the choice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from actmat.extras.tune.groups import group_rules
from actmat.extras.tune.report import Rival
from actmat.extras.tune.space import Candidate, MergeChoice, Space
from actmat.methods import get_method
from actmat.recipe import ExpertRef, Recipe

__all__ = ["final_recipe", "notes_on_choice", "notes_on_space"]

KEPT = "kept-statistics"
"""Folder of the statistics that the chosen method needs."""


def final_recipe(
    made: Recipe, given: Recipe, chosen: Candidate, groups: Mapping[str, str], work: Path, collected: Path
) -> Recipe:
    """The recipe that makes the chosen merge; needs data only if its method needs statistics.

    Args:
        made: the recipe of the chosen merge at its scale, without an output.
        given: the user's recipe.
        groups: tensor -> group.
        work: folder of the search, where statistics that are needed are kept.
        collected: folder of the statistics that were measured for the search.
    """
    keep = get_method(chosen.merge.method).needs_statistics

    def kept(expert: ExpertRef) -> str:
        place = Path(expert.statistics)
        if not keep or place.parent != collected:
            return expert.statistics if keep else ""
        target = work / KEPT / place.name
        if not target.exists():
            shutil.copytree(place, target)
        return str(target)

    experts = tuple(ExpertRef.model_validate({**e.model_dump(), "statistics": kept(e)}) for e in made.experts)
    factors = {g: chosen.factor(g) for g in chosen.groups}
    rules = (*made.rules, *group_rules(groups, factors))
    fields = {"experts": experts, "rules": rules, "out": given.out, "output": given.output or made.output}
    return Recipe.model_validate({**made.model_dump(), **fields})


def notes_on_choice(finals: Sequence[Rival], *, allowed: bool, least_agreement: float) -> Iterator[str]:
    """Rivals that are as good or better, and a constraint that nothing keeps."""
    for rival in finals[1:]:
        if rival.name == "base" or rival.verdict == "worse":
            continue
        if rival.verdict == "not told apart":
            yield f"On unseen inputs, the chosen merge is not distinguishable from {rival.name}."
        else:
            yield (
                f"On unseen inputs, {rival.name} is better than the chosen merge: there are too few inputs to choose "
                "from so many candidates."
            )
    if not allowed:
        yield (
            f"No candidate keeps {least_agreement:.0%} of every expert's predictions; the one whose worst expert keeps "
            "most was taken."
        )


def notes_on_space(space: Space, choices: Sequence[MergeChoice]) -> Iterator[str]:
    """Methods for which the experts' weights are not searched, although that was asked for."""
    if not space.weights:
        return
    without = sorted({c.method for c in choices if not get_method(c.method).is_weighted})
    if len(without) == len({c.method for c in choices}):
        yield f"Weights of the experts were not searched: no method takes any ({', '.join(without)})."
    elif without:
        yield (
            "Weights of the experts were searched around the best merge whose method takes weights, so not with "
            f"{', '.join(without)}."
        )
