"""A stack: layers of one or several checkpoints, one after the other, as one checkpoint ("frankenmerge").

    base[0:16] + math[8:24]

The layers are renumbered from 0. Tensors before the layers (embeddings) come from the first part, tensors after them
(final norm, output head) from the last part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actmat.checkpoints.base import Checkpoint, CheckpointHandle
from actmat.checkpoints.layer_names import StackPart, is_before_layers, split_layer
from actmat.errors import CheckpointError
from actmat.extras.stack.composed import ComposedCheckpoint, Origin

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Config fields with the number of layers."""

SAME_KEYS = ("model_type", "hidden_size", "n_embd", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Config entries that must be equal in all parts."""


def open_stack(
    location: str,
    parts: Sequence[StackPart],
    open_part: Callable[[str], Checkpoint],
) -> StackedCheckpoint:
    """Open every checkpoint of a stack once with `open_part`; reads only headers.

    Raises:
        CheckpointError: a checkpoint cannot be opened, lacks layers, or has other shapes; lists all
        problems.
    """
    with contextlib.ExitStack() as stack:
        opened: dict[str, Checkpoint] = {}
        problems: list[str] = []
        for part in parts:
            if part.location in opened:
                continue
            try:
                opened[part.location] = stack.enter_context(open_part(part.location))
            except CheckpointError as error:
                problems += error.problems
        if not problems:
            problems = _problems(parts, opened)
        if problems:
            raise CheckpointError(f"The stack {location} cannot be built.", problems)
        stack.pop_all()
        return StackedCheckpoint(location, [(opened[p.location], p) for p in parts])


class StackedCheckpoint(ComposedCheckpoint):
    """Layers of open checkpoints; closes them.

    Args:
        location: the stack as given by the user.
        parts: checkpoint and layers of every part.
    """

    def __init__(self, location: str, parts: Sequence[tuple[Checkpoint, StackPart]]) -> None:
        self._parts = list(parts)
        super().__init__(location, parts[0][0], _origins(self._parts))

    @property
    def n_layers(self) -> int:
        """Number of layers of the stack."""
        return sum(part.stop - part.start for _, part in self._parts)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The first part's config with the stack's number of layers."""
        config = self._parts[0][0].config
        if config is None:
            return None
        inner = config.get("text_config")
        if not any(k in config for k in DEPTH_KEYS) and isinstance(inner, Mapping):
            return {**config, "text_config": self._deepened(inner)}
        return self._deepened(config)

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """The config, written instead of a copy."""
        return self.config

    def handle(self) -> CheckpointHandle:
        """Handle of the stack: the handles of its parts."""
        handles = {id(c): c.handle() for c in self.checkpoints}
        parts = tuple((handles[id(c)], p.location, p.start, p.stop) for c, p in self._parts)
        return CheckpointHandle(self.location, "stack", self.location, parts=parts)

    def _deepened(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config with the stack's number of layers; lists with an entry per layer are also stacked."""
        out = dict(config)
        depth = next((config[k] for k in DEPTH_KEYS if k in config), None)
        for key, value in config.items():
            if key in DEPTH_KEYS:
                out[key] = self.n_layers
            elif key == "layer_types" and isinstance(value, list) and len(value) == depth:
                out[key] = [t for c, p in self._parts for t in _layer_types(c.config, value)[p.start : p.stop]]
        return out


def _layer_types(config: Mapping[str, Any] | None, default: list[Any]) -> list[Any]:
    inner = (config or {}).get("text_config")
    own = (config or {}).get("layer_types") or (inner.get("layer_types") if isinstance(inner, Mapping) else None)
    return own if isinstance(own, list) else default


def _origins(parts: Sequence[tuple[Checkpoint, StackPart]]) -> dict[str, Origin]:
    """Origin of every tensor of the stack: embeddings, layers, the rest."""
    first, last = parts[0][0], parts[-1][0]
    out = {n: Origin(first, n) for n in first.specs if is_before_layers(n)}
    offset = 0
    for checkpoint, part in parts:
        for name in checkpoint.specs:
            found = split_layer(name)
            if found is not None and part.start <= found[1] < part.stop:
                out[f"{found[0]}{offset + found[1] - part.start}{found[2]}"] = Origin(checkpoint, name)
        offset += part.stop - part.start
    after = [n for n in last.specs if split_layer(n) is None and not is_before_layers(n)]
    return out | {n: Origin(last, n) for n in after}


def _problems(parts: Sequence[StackPart], opened: Mapping[str, Checkpoint]) -> list[str]:
    """Problems that prevent stacking these parts."""
    problems: list[str] = []
    stacks: dict[str, str] = {}
    for part in dict.fromkeys(parts):
        checkpoint = opened[part.location]
        found = [f for n in checkpoint.specs if (f := split_layer(n)) is not None]
        prefixes = sorted({f[0] for f in found})
        count = 1 + max((f[1] for f in found), default=-1)
        if len(prefixes) != 1:
            listed = ", ".join(f"'{p}'" for p in prefixes) or "none"
            problems.append(f"{part.location}: expected one stack of numbered layers, found {listed}")
            continue
        stacks.setdefault(prefixes[0], part.location)
        if not part.start < part.stop <= count:
            problems.append(
                f"{part}: expected at least one layer within [0:{count}], the layers of the model; the "
                "second number is excluded"
            )
    if len(stacks) > 1:
        listed = ", ".join(f"'{prefix}' in {location}" for prefix, location in stacks.items())
        problems.append(f"the layers have different names: {listed}. Likely cause: models of different architectures")
    return problems + _disagreements(opened)


def _disagreements(opened: Mapping[str, Checkpoint]) -> list[str]:
    """Problems: config entries that differ but must be equal."""
    problems = []
    for key in SAME_KEYS:
        values = {n: c.config[key] for n, c in opened.items() if c.config is not None and key in c.config}
        if len({str(v) for v in values.values()}) > 1:
            listed = ", ".join(f"{v} in {n}" for n, v in values.items())
            problems.append(f"config.json: '{key}' is {listed}; layers of these models cannot be stacked")
    return problems
