"""Words of a plan about quantised inputs: the layout of each tensor, and the form of the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actmat.checkpoints.base import Checkpoint
from actmat.experts.base import Expert, Source

__all__ = ["quantisation_notes", "scheme_words"]


def scheme_words(
    name: str, base: Checkpoint, sources: Sequence[Source | None], experts: Sequence[Expert], labels: Sequence[str]
) -> str:
    """Sentence part about the inputs that store a tensor as codes; empty where none does.

    Args:
        name: of the tensor in the base.
        sources: per expert, where its delta comes from; none where no expert is read.
    """
    found: dict[str, list[str]] = {}
    if scheme := base.scheme(name):
        found.setdefault(scheme, []).append("the base")
    for label, expert, source in zip(labels, experts, sources, strict=False):
        if source is not None and (scheme := expert.scheme(source.name)):
            found.setdefault(scheme, []).append(f"expert '{label}'")
    return "".join(f"; decoded from {scheme} in {_listed(who)}" for scheme, who in found.items())


def quantisation_notes(base: Checkpoint, experts: Sequence[Expert], labels: Sequence[str]) -> list[str]:
    """Notes about quantised inputs: what they are, what is written, and how they differ."""
    of_base = _schemes(base)
    of_experts = [(label, _schemes(expert)) for label, expert in zip(labels, experts, strict=True)]
    notes = [
        f"{who} stores {sum(schemes.values())} tensors as codes ({'; '.join(schemes)}): they are decoded as they are "
        "read"
        for who, schemes in (("the base", of_base), *((f"expert '{n}'", s) for n, s in of_experts))
        if schemes
    ]
    if of_base:
        notes.append(
            "the output is not quantised: decoded tensors are written as floats, and config.json without its entry "
            "about quantisation"
        )
    full = [(n, set(s)) for (n, s), e in zip(of_experts, experts, strict=True) if e.kind == "model"]
    other = [n for n, schemes in full if schemes != set(of_base)]
    if other:
        notes.append(
            f"{_listed([f'expert {n!r}' for n in other])} and the base are quantised in different ways, or one of them "
            "is not: their deltas hold the rounding errors of both"
        )
    elif of_base and full:
        notes.append("base and experts were rounded to codes each by itself: deltas hold the rounding errors of both")
    return notes


def _schemes(source: Checkpoint | Expert) -> Counter[str]:
    """Number of tensors of each scheme."""
    return Counter(s for name in source.specs if (s := source.scheme(name)))


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
