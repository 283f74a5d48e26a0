"""Select the model's tensors from a training checkpoint, by the keys of its nested state dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from actmat.errors import CheckpointError

WRAPPERS = ("app", "state", "state_dict", "model", "model_state_dict", "module")
"""Keys under which training programs store the model's state dict."""

TRAINING = frozenset(
    {"optim", "optims", "optimizer", "optimizers", "optim_state", "optimizer_state", "opt", "opt_state"}
    | {"lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "rng", "rng_state", "scaler"}
)
"""Keys of training state that is not part of the model."""


class ModelPart(NamedTuple):
    """Model tensors (name -> name in the checkpoint) and a note per kind of tensor left out."""

    names: dict[str, str]
    notes: tuple[str, ...]


def model_part(names: Iterable[str], paths: Mapping[str, tuple[str, ...]], location: str) -> ModelPart:
    """Tensors of the model under their own names.

    A path such as `("app", "model", "layers.0.weight")` loses the keys of `WRAPPERS` in front, each once; one with a
    key of `TRAINING` is state of the optimizer and of training, which is left out. Names without a path are kept, as
    torchtitan saves them, unless their first part is a key of `TRAINING`.

    >>> paths = {"model.a": ("model", "a"), "optim.state.a": ("optim", "state", "a")}
    >>> model_part(paths, paths, "step-1")
    ModelPart(names={'a': 'model.a'}, notes=("1 tensors of training ('optim') are left out",))

    Raises:
        CheckpointError: the checkpoint has no model, or two.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    training: Counter[str] = Counter()
    for name in names:
        path = paths.get(name) or (name,)
        mark = next((k for k in path[:-1] if k in TRAINING), None)
        if mark is None and name.partition(".")[0] in TRAINING:
            mark = name.partition(".")[0]
        if mark is not None:
            training[mark] += 1
            continue
        wrapper, rest = _unwrapped(path)
        groups.setdefault(wrapper, {})[".".join(rest)] = name
    wrapped = [w for w in groups if w]
    if len(wrapped) > 1 or not groups:
        parts = " and ".join("'" + ".".join(w) + "'" for w in wrapped) or "only state of training"
        raise CheckpointError(
            f"{location}: expected the tensors of one model, found {parts}. Fix: save the intended state dict "
            "separately: dcp.save({'model': model.state_dict()}, checkpoint_id=...)"
        )
    chosen = wrapped[0] if wrapped else ()
    notes = []
    if training:
        listed = ", ".join(f"'{k}'" for k in training)
        notes.append(f"{training.total()} tensors of training ({listed}) are left out")
    others = [n for w, group in groups.items() if w != chosen for n in group.values()]
    if others:
        notes.append(f"{len(others)} tensors outside of '{'.'.join(chosen)}' are left out, such as '{others[0]}'")
    return ModelPart(groups[chosen], tuple(notes))


def _unwrapped(path: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a path into leading keys of `WRAPPERS`, each once, and the rest."""
    count = 0
    while count < len(path) - 1 and path[count] in WRAPPERS and path[count] not in path[:count]:
        count += 1
    return path[:count], path[count:]
