"""The call of a method, and of the steps of post-processing, in a plan: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actmat.methods.post import PostStep, Step, get_step
from actmat.methods.spaces import Space
from actmat.planning.forms import Plain

__all__ = ["MethodCall", "PostCall"]


@dataclass(frozen=True, slots=True)
class PostCall(Plain):
    """One step of post-processing with all its options."""

    name: str
    options: Mapping[str, Any]

    @property
    def step(self) -> PostStep:
        """Declaration of the step."""
        return get_step(self.name)


@dataclass(frozen=True, slots=True)
class MethodCall(Plain):
    """One method with all its options: `W* = W_0 + scale * D*`.

    Args:
        space: in which the method works, see `methods.spaces`.
        post: steps that change its result, the one over layers at the end.
    """

    method: str
    options: Mapping[str, Any]
    scale: float = 1.0
    weights: tuple[float, ...] | None = None
    space: Space = "full"
    post: tuple[PostCall, ...] = ()

    @property
    def matrix_steps(self) -> list[Step]:
        """Steps that look at one matrix, with their options."""
        return [(p.step, p.options) for p in self.post if p.step.layers is None]

    @property
    def layer_call(self) -> PostCall | None:
        """The step that looks at all layers, if there is one."""
        return next((p for p in self.post if p.step.layers is not None), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        out: dict[str, Any] = {"method": self.method, "options": dict(self.options), "scale": self.scale}
        if self.weights is not None:
            out["weights"] = list(self.weights)
        if self.space != "full":
            out["space"] = self.space
        if self.post:
            out["post"] = [{"name": p.name, "options": dict(p.options)} for p in self.post]
        return out
