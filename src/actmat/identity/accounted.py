"""Trained weights that a merge does not read: files beside models and adapters, lost modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX_SUFFIX, may_be_weights
from actmat.checkpoints.side_files import SideFiles, is_weights
from actmat.errors import first_names

_WHOLE = re.compile(
    r"(pytorch_|tf_|flax_|diffusion_pytorch_|rust_)?model\b|consolidated|(onnx|original|openvino|coreml|gguf)/|checkpoint"
    r"|global_step|.*\.(gguf|llamafile)$"
)
"""Beginnings of files and folders that hold the whole model again, or an earlier state of it."""
_ADDED_BY_TASK = frozenset({"classifier", "score"})
"""Heads that PEFT lists for every classifier, of which a model has one."""


def file_warnings(base: SideFiles, experts: Mapping[str, SideFiles]) -> list[str]:
    """Warnings on weights in the folders of full experts that are not of their model, and not in that of the base."""
    found = []
    for label, files in experts.items():
        left = [p for p, why in files.left_out.items() if why.code == "weights" and p not in base.left_out]
        if others := [p for p in left if (may_be_weights(p) or p in ADAPTER_WEIGHTS) and not _WHOLE.match(p)]:
            found.append(
                f"expert '{label}' has weights beside its model that are not merged: {first_names(others)}. If it "
                "needs them, merge them by themselves, and put the result into the output"
            )
    return found


def adapter_warnings(
    label: str, names: Collection[str], fields: Mapping[str, Any], stored: Iterable[str], base: Iterable[str]
) -> list[str]:
    """Warnings on training of an adapter that is not in its weights.

    Args:
        label: of the expert.
        names: of files in its folder: a value head, a projector.
        fields: of its config.
        stored: names of its tensors.
        base: names of the base's tensors.
    """
    found = []
    weights = (n for n in names if is_weights(n) and may_be_weights(n) and not n.endswith(INDEX_SUFFIX))
    if others := sorted(weights) if ADAPTER_CONFIG in names else []:
        found.append(
            f"expert '{label}' has weights beside its adapter that are not merged: {first_names(others)}. Load them "
            "after the merge with the code that trained them"
        )
    listed = fields.get("modules_to_save")
    saved = [str(n) for n in listed] if isinstance(listed, list | tuple) else []
    held, of_base = _parts(stored), _parts(base)
    lost = [n for n in saved if not set(n.split(".")) <= held and (n.rpartition(".")[2] in of_base)]
    if saved and not lost and not any(set(n.split(".")) <= held for n in saved) and set(saved) <= _ADDED_BY_TASK:
        lost = saved[-1:]
    if lost:
        found.append(
            f"expert '{label}': modules_to_save lists {first_names(lost)}, and its file has no tensor of them: their "
            "training is lost, the base's stay. Likely cause: a trainer that saved the factors only"
        )
    return found


def _parts(names: Iterable[str]) -> set[str]:
    return {part for name in names for part in name.split(".")}
