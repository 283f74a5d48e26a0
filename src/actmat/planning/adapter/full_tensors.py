"""Items for tensors that adapters trained in full (`modules_to_save`, biases)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actmat.checkpoints.base import TensorSpec
from actmat.experts.base import Source
from actmat.experts.lora.adapter import Adapter
from actmat.layout.types import Role, TensorLayout
from actmat.planning.choose import Chooser
from actmat.planning.model import Cost, Item, MethodCall
from actmat.recipe import Recipe

__all__ = ["plan_full_tensors", "shapes_text"]


def plan_full_tensors(
    recipe: Recipe, adapters: Sequence[Adapter], chooser: Chooser, kept: dict[str, str], dtype: str
) -> tuple[tuple[Item, ...], list[str], list[str]]:
    """Tensors trained in full, problems and notes; names that the recipe keeps go to `kept`."""
    out, problems, notes = [], [], []
    for name in {n: None for a in adapters for n in a.extras}:
        if (pattern := chooser.keeps(name)) is not None:
            kept[name] = pattern
            continue
        weights = chooser.average(name).weights
        stored = [a.weights.specs[a.extras[name]] if name in a.extras else None for a in adapters]
        shapes = {s.shape: None for s in stored if s is not None}
        if len(shapes) > 1:
            problems.append(
                f"tensor '{name}' has shapes {shapes_text(shapes)} in the adapters; other numbers of classes?"
            )
            continue
        missing = [label for label, s in zip(recipe.labels, stored, strict=True) if s is None]
        reason = "trained in full: mean over the experts"
        if missing:
            reason += f" that have it; not in {', '.join(missing)}"
            notes.append(f"'{name}' is not in {', '.join(missing)}: mean over the others")
        if weights is not None and sum(w for w, s in zip(weights, stored, strict=True) if s is not None) == 0:
            having = ", ".join(label for label in recipe.labels if label not in missing)
            problems.append(
                f"tensor '{name}' is trained in full in {having} only, of total weight 0; give a weight, or keep the "
                "tensor as it is in the base (--keep)"
            )
            continue
        shape = next(iter(shapes))
        output = TensorSpec(next(s.name for s in stored if s is not None), shape, dtype, "")
        out.append(
            Item(
                name=name,
                shape=shape,
                layout=TensorLayout(Role.VECTOR, reason),
                action="average",
                reason=reason,
                outputs=(output,),
                call=MethodCall("average", {}, 1.0, weights),
                sources=tuple(None if s is None else Source(s.name, "stored", s.dtype, s.nbytes) for s in stored),
                cost=Cost(
                    read_bytes=sum(s.nbytes for s in stored if s is not None),
                    write_bytes=output.nbytes,
                    flops=output.numel * len(stored),
                    host_bytes=24 * output.numel,
                ),
            )
        )
    return tuple(out), problems, notes


def shapes_text(shapes: Iterable[tuple[int, ...]]) -> str:
    """Shapes as a reader writes them: `4x8 and 4x16`."""
    return " and ".join("x".join(map(str, s)) for s in shapes)
