"""A stack: layers of one or several checkpoints, one after the other, as one checkpoint ("frankenmerge").

    base[0:16] + math[8:24]

The layers are renumbered from 0. Tensors before the layers (embeddings) come from the first part, tensors after them
(final norm, output head) from the last part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, FileIdentity
from actmat.checkpoints.layer_names import StackPart, is_before_layers, split_layer
from actmat.checkpoints.resolve import StackHandle, commit_of
from actmat.checkpoints.side_files import ModelFiles, SideFiles
from actmat.checkpoints.view import DelegatingCheckpoint
from actmat.errors import CheckpointError
from actmat.experts.base import Expert
from actmat.extras.stack.layers import Slice, restacked, without_layers
from actmat.identity.configs import compare_configs, listed

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


class StackedCheckpoint(DelegatingCheckpoint):
    """Layers of open checkpoints; closes them. Config, tokenizer and code files are those of the first.

    Args:
        location: the stack as given by the user.
        parts: checkpoint and layers of every part.
    """

    is_composed = True

    def __init__(self, location: str, parts: Sequence[tuple[Checkpoint, StackPart]]) -> None:
        self._parts, self._origins = list(parts), _origins(parts)
        self._first = parts[0][0]
        self.location, self.directory = location, self._first.directory
        self.checkpoints = list(dict.fromkeys([self._first, *(held for held, _ in self._origins.values())]))
        self.models = models_of(self.checkpoints)
        self.absent = tuple(dict.fromkeys(n for c in self.checkpoints for n in c.absent))
        self.specs = MappingProxyType(
            {
                name: replace(held.specs[own], name=name, file=f"{held.location}/{held.specs[own].file}")
                for name, (held, own) in self._origins.items()
            }
        )
        stored = {(id(held), own): name for name, (held, own) in reversed(self._origins.items())}
        shared = {n: stored.get((id(held), held.aliases.get(own, ""))) for n, (held, own) in self._origins.items()}
        self.aliases = MappingProxyType({name: target for name, target in shared.items() if target is not None})
        self.notes = (*self.notes, *_notes(self.checkpoints))

    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """See `DelegatingCheckpoint`."""
        return self._origins[name]

    def sources(self) -> tuple[ModelFiles, ...]:
        """Files of all checkpoints."""
        return tuple(source for c in self.checkpoints for source in c.sources())

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the weight files of all checkpoints."""
        return tuple(dict.fromkeys(i for c in self.checkpoints for i in c.identity()))

    @property
    def buffer_bytes(self) -> int:
        """Sum over all checkpoints, because each may read ahead."""
        return sum(c.buffer_bytes for c in self.checkpoints)

    def side_files(self) -> SideFiles:
        """Side files of the first checkpoint."""
        return self._first.side_files()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of the files of the first checkpoint."""
        return self._first.fetch_sidecars()

    def close(self) -> None:
        """Close all checkpoints."""
        for checkpoint in self.checkpoints:
            checkpoint.close()

    @property
    def n_layers(self) -> int:
        """Number of layers of the stack."""
        return sum(part.stop - part.start for _, part in self._parts)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The first part's config with the stack's number of layers, and its entries for each of them."""
        return None if self._first.config is None else restacked(_slices(self._parts))[0]

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """The config, written instead of a copy."""
        return self.config

    def handle(self) -> CheckpointHandle:
        """Handle of the stack: the handles of its parts."""
        handles = {id(c): c.handle() for c in self.checkpoints}
        view = StackHandle(self.location, tuple((handles[id(c)], p) for c, p in self._parts))
        return CheckpointHandle(self.location, "stack", self.location, view=view)


def models_of(sources: Iterable[Checkpoint | Expert]) -> tuple[str, ...]:
    """Locations of the sources, with commits for the hub; composed sources are expanded."""
    return tuple(dict.fromkeys(name for source in sources for name in (source.models or (_pinned(source),))))


def _pinned(source: Checkpoint | Expert) -> str:
    return address if commit_of(address := source.handle().address) else source.location


def _slices(parts: Sequence[tuple[Checkpoint, StackPart]]) -> list[Slice]:
    return [Slice(c.config or {}, p.start, p.stop) for c, p in parts]


def _origins(parts: Sequence[tuple[Checkpoint, StackPart]]) -> dict[str, tuple[Checkpoint, str]]:
    """Origin of every tensor of the stack: embeddings, layers, the rest."""
    first, last = parts[0][0], parts[-1][0]
    out = {n: (first, n) for n in first.specs if is_before_layers(n)}
    offset = 0
    for checkpoint, part in parts:
        for name in checkpoint.specs:
            found = split_layer(name)
            if found is not None and part.start <= found[1] < part.stop:
                out[f"{found[0]}{offset + found[1] - part.start}{found[2]}"] = checkpoint, name
        offset += part.stop - part.start
    after = [n for n in last.specs if split_layer(n) is None and not is_before_layers(n)]
    return out | {n: (last, n) for n in after}


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
    problems += _disagreements(opened)
    whole = [(opened[p.location], p) for p in parts]
    return problems if problems or whole[0][0].config is None else restacked(_slices(whole))[1]


def _notes(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """A note on entries of config.json that differ between the parts, except those of each layer."""
    first, *others = [(c.location, without_layers(c.config)) for c in checkpoints if c.config is not None] or [("", {})]
    differences, _ = compare_configs(first[1], dict(others))
    owner = f"'{first[0]}'"
    words = f"entries of the parts differ, and are written as in {owner}: {listed(differences, owner)}"
    return (f"config.json: {words}",) if differences else ()


def _disagreements(opened: Mapping[str, Checkpoint]) -> list[str]:
    """Problems: config entries that differ but must be equal."""
    problems = []
    for key in SAME_KEYS:
        values = {n: c.config[key] for n, c in opened.items() if c.config is not None and key in c.config}
        if len({str(v) for v in values.values()}) > 1:
            listed = ", ".join(f"{v} in {n}" for n, v in values.items())
            problems.append(f"config.json: '{key}' is {listed}; layers of these models cannot be stacked")
    return problems
