"""Parts of checkpoints that hold several models: which are copied, how the output's files are named, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actmat.checkpoints.base import Checkpoint
from actmat.experts.base import Expert
from actmat.layout.components import component_configs, parts_of, single_file_of

__all__ = ["absent_parts", "part_notes", "stems_of"]

DIFFUSERS_STEM = "diffusion_pytorch_model"
"""Start of the names of diffusers' weight files."""


def absent_parts(base: Checkpoint, experts: Sequence[Expert], labels: Sequence[str]) -> dict[str, str]:
    """Base tensor -> why it is copied: an expert has no tensor at all of its part, or its layout has no such tensor.

    An expert that is one component of a pipeline has its names without the component's prefix.
    """
    out: dict[str, str] = {}
    for part, prefix in parts_of(base.specs, base.config).items():
        names = [n for n in base.specs if n.startswith(prefix)]
        lacking = [
            label
            for label, expert in zip(labels, experts, strict=True)
            if expert.kind == "model"
            and not any(n.startswith(prefix) for n in expert.specs)
            and not any(n.removeprefix(prefix) in expert.specs for n in names)
        ]
        if lacking:
            who = ", ".join(f"'{label}'" for label in lacking)
            out |= dict.fromkeys(names, f"expert {who} has no {part} ({prefix}*): copied from the base")
    for label, expert in zip(labels, experts, strict=True):
        for name, why in expert.lacks.items():
            out.setdefault(name, f"{why}, expert '{label}': copied from the base")
    return out


def stems_of(base: Checkpoint) -> tuple[str, Mapping[str, str]]:
    """Name of the output's weight files; and for a pipeline, prefix of a component -> folder and name of its files."""
    components = component_configs(base.config)
    if components is None:
        return _stem(base.config), {}
    return "model", {f"{name}.": f"{name}/{_stem(config)}" for name, config in components.items()}


def part_notes(base: Checkpoint) -> list[str]:
    """Notes on a base that is a single file of an image or video tool, or a pipeline."""
    components = component_configs(base.config)
    if components is not None:
        return [f"the base is a pipeline with weights in {', '.join(components)}; its other files are copied"]
    single = single_file_of(base.specs)
    return [] if single is None else [f"the base is {single.words}"]


def _stem(config: Mapping[str, object] | None) -> str:
    return DIFFUSERS_STEM if config is not None and "_class_name" in config else "model"
