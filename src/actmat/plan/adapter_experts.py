"""What adapters among the experts change in the plan of a full model."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.checkpoints.adapter_expert import AdapterExpert, is_formed
from actmat.checkpoints.base import Checkpoint
from actmat.errors import RecipeError
from actmat.methods import get_method
from actmat.plan.adapter_problems import adapter_problems, why_not_factored
from actmat.plan.choose import Decision
from actmat.plan.model import MethodCall, TensorPlan
from actmat.recipe import Recipe

__all__ = ["adapter_notes", "can_walk", "is_factored", "read_bytes", "untouched"]


def untouched(decision: Decision, sources: Sequence[str | None], experts: Sequence[Checkpoint]) -> Decision:
    """A copy where every expert is an adapter and none changes the tensor: nothing is computed, nothing rounded."""
    if decision.call is None:
        return decision
    for expert, source in zip(experts, sources, strict=True):
        if not isinstance(expert, AdapterExpert) or (source is not None and expert.touches(source)):
            return decision
    return Decision("copy", "no adapter changes it: copied from the base", decision.layout)


def is_factored(recipe: Recipe, call: MethodCall, experts: Sequence[Checkpoint], sources: Sequence[str]) -> bool:
    """Whether a matrix rule can work on the factors: adapters alone, none of them with the whole tensor."""
    method = get_method(call.method)
    if method.acts_on != "matrix" or recipe.pool:
        return False
    if method.survey is not None and method.survey.applies(call.options):
        return False  # the survey of a full model sees dense deltas, and both must see the same
    for expert, source in zip(experts, sources, strict=True):
        if not is_formed(expert, source):
            return False
    return not why_not_factored(call, len(experts))


def can_walk(device: str, experts: Sequence[Checkpoint], sources: Sequence[str]) -> bool:
    """Whether the deltas of a tensor may be read place by place.

    What adapters store gives the same bits for whole parts alone, and a place is too small a task for an accelerator.
    """
    return device == "cpu" and not any(is_formed(e, s) for e, s in zip(experts, sources, strict=False))


def read_bytes(expert: Checkpoint, source: str) -> int:
    """Bytes that are read of an expert for one tensor."""
    return expert.nbytes_of(source) if isinstance(expert, AdapterExpert) else expert.specs[source].nbytes


def adapter_notes(recipe: Recipe, experts: Sequence[Checkpoint], tensors: Sequence[TensorPlan]) -> list[str]:
    """What a reader of the plan should know about the adapters among the experts.

    Raises:
        RecipeError: the adapters name different bases.
    """
    found = {label: e for label, e in zip(recipe.labels, experts, strict=True) if isinstance(e, AdapterExpert)}
    if not found:
        return []
    chosen = tuple(e for e in recipe.experts if e.label in found)
    problems = adapter_problems(recipe.model_copy(update={"experts": chosen}), [e.adapter for e in found.values()])
    if problems:
        raise RecipeError("The adapters do not fit together.", problems)
    notes = []
    for label, expert in found.items():
        changed = sum(any(expert.touches(s) for s in {t.name, *t.sources}) for t in tensors)
        notes.append(f"expert '{label}' is an adapter: it changes {changed} tensors, the rest are zero deltas")
        if expert.adapter.copies:
            notes.append(f"expert '{label}' holds copies of base weights; the base's own are used")
    free = [t for t in tensors if t.factored and t.call is not None and get_method(t.call.method).meets_every_expert]
    small = [t for t in free if sum(_rank(e, s) for e, s in zip(experts, t.sources, strict=True)) <= min(t.shape[-2:])]
    if small and len(experts) > 1:
        notes.append(
            f"in {len(small)} tensors the ranks add up to no more than the inputs: where the experts' row spaces are "
            "independent there, the merge meets every expert on its own rows and is close to the plain sum of the "
            "deltas; --scale or another method shrinks it"
        )
    return notes


def _rank(expert: Checkpoint, source: str) -> int:
    piece = expert.pieces.get(source) if isinstance(expert, AdapterExpert) else None
    return 0 if piece is None else piece.module.rank
