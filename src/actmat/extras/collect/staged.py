"""Staged statistics (RegMean++): every block is measured on activations that come through the merged blocks before it.

T.-H. Nguyen et al., "RegMean++", 2025, arXiv:2508.03121. The solve is RegMean's; only the inputs of the Gram matrices
differ. Inside its block an expert's later layers see its own earlier ones.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.model import Model
from actmat.errors import StatisticsError
from actmat.experts.locate import OpenInput, locate, locate_in, require_model, stored_of
from actmat.extras.collect.batches import Batch
from actmat.extras.collect.binding import Binding, bind
from actmat.extras.collect.collect import measured
from actmat.extras.collect.files import join_statistics
from actmat.extras.collect.measures import Measurement, Settings
from actmat.extras.models.layered import block_lists
from actmat.recipe import add_statistics, make_recipe
from actmat.recipe.arguments import Location
from actmat.run import run_recipes
from actmat.settings import RunSettings
from actmat.statistics.header import ModelInfo, content_hash
from actmat.statistics.store import open_statistics

Batches = Callable[[], Iterable[Batch]]
"""Makes the batches of an expert's task, the same ones every time."""


def measure_blocks(
    model: nn.Module,
    base: Location,
    experts: Mapping[str, Location],
    batches: Mapping[str, Batches],
    out: Path,
    blocks: str | None,
    off_diagonal: float,
    compute_dtype: str,
) -> dict[str, Path]:
    """Folders of `actmat.staged_statistics`."""
    names = _blocks(model, blocks)
    stages, folders = out / "stages", {label: out / label for label in experts}
    with contextlib.ExitStack() as stack:
        located = {label: locate_in(stack, place) for label, place in experts.items()}
        _check(located, batches)
        opened = {label: require_model(expert) for label, expert in located.items()}
        start = require_model(locate_in(stack, base))
        bound = bind(model, start)
        job = _Job(model, start, opened, bound, {n: _rebound(bound, c) for n, c in opened.items()}, compute_dtype)
        identity = hash_names([(n, b.info.content) for n, b in [("", bound), *job.bindings.items()]])
        details = {"staged": identity, "blocks": ",".join(names), "off_diagonal": repr(off_diagonal)}
        job.put_average(bound.parameters)
        for index, name in enumerate(names):
            block = [p for p in bound.parameters if p.startswith(f"{name}.")]
            parts = {label: stages / f"{index:04d}" / label for label in experts}
            for label, part in parts.items():
                if not _is_measured(part, job.bindings[label].info, details):
                    job.put(block, label)
                    job.measure(label, block, batches[label](), details).save(part)
            job.put_merged(block, parts, off_diagonal)
    for label, folder in folders.items():
        if not _is_measured(folder, job.bindings[label].info, details):
            join_statistics([stages / f"{i:04d}" / label for i in range(len(names))], folder)
    return folders


@dataclass(frozen=True)
class _Job:
    """The model between two stages, with its base, experts and bindings."""

    model: nn.Module
    base: Model
    experts: Mapping[str, Model]
    bound: Binding
    bindings: Mapping[str, Binding]
    compute_dtype: str

    def put(self, parameters: Iterable[str], label: str) -> None:
        """Put an expert's parameters into the model."""
        self._put(parameters, self.experts[label].tensors.read)

    def put_average(self, parameters: Iterable[str]) -> None:
        """Put the average of the experts' parameters into the model, one tensor at a time."""

        def average(name: str) -> Tensor:
            values = (expert.tensors.read(name) for expert in self.experts.values())
            total = next(values).double()
            for value in values:
                total += value
            return total / len(self.experts)

        self._put((p for p in parameters if self.bound.parameters[p].is_floating_point()), average)

    def measure(self, label: str, block: Sequence[str], batches: Iterable[Batch], details: Mapping[str, str]) -> Any:
        """Gram matrices of the block that is the expert's."""
        settings = Settings(
            only=[p for p in block if p in self.bound.weights()],
            compute_dtype=self.compute_dtype,
            dtype=self.compute_dtype,
            source=f"staged batches of {label}",
            details=details,
        )
        return measured(Measurement(self.model, self.bindings[label], settings), batches)

    def put_merged(self, block: Sequence[str], statistics: Mapping[str, Path], off_diagonal: float) -> None:
        """Merge a block from its statistics, as a checkpoint of its own, and put it into the model."""
        dtype = str(next(iter(self.bound.parameters.values())).dtype).removeprefix("torch.")
        with tempfile.TemporaryDirectory(prefix="actmat-stage-") as temporary:
            folder = Path(temporary)
            stored = [piece.name for p in block for piece in self.bound.located[p].slices]
            for label, checkpoint in [("base", self.base), *self.experts.items()]:
                _write(checkpoint, stored, folder / "in" / label)
            experts = [{"path": str(folder / "in" / label), "name": label} for label in self.experts]
            fields: dict[str, Any] = {
                "base": str(folder / "in" / "base"),
                "experts": add_statistics(experts, statistics),
                "out": str(folder / "out"),
                "method": "regmean",
                "options": {"off_diagonal": off_diagonal},
                "compute_dtype": self.compute_dtype,
                "dtype": dtype,
            }
            run_recipes([make_recipe(fields)], RunSettings(durable=False, threads=1))
            with locate(folder / "out") as merged:
                self._put(block, stored_of(merged).tensors.read)

    def _put(self, parameters: Iterable[str], read: Callable[[str], Tensor]) -> None:
        with torch.no_grad():
            for name in parameters:
                for piece in self.bound.located[name].slices:
                    piece.of(self.bound.parameters[name]).copy_(read(piece.name))


def _blocks(model: nn.Module, wanted: str | None) -> list[str]:
    """Names of the blocks, in order."""
    if wanted is None:
        outer = list(block_lists(model))
        if len(outer) != 1:
            found = ", ".join(outer) or "none"
            raise StatisticsError(
                f"Staged statistics need one list of blocks; found {found}. Fix: name the module "
                'whose children are the blocks, such as blocks="model.layers".'
            )
        wanted = outer[0]
    modules = dict(model.named_modules())
    children = [n for n, _ in modules[wanted].named_children()] if wanted in modules else []
    if not children:
        raise StatisticsError(f"The model has no module '{wanted}' with children; blocks= names one that has.")
    return [f"{wanted}.{child}" for child in children]


def _check(experts: Mapping[str, OpenInput], batches: Mapping[str, Batches]) -> None:
    problems = [
        f"expert '{label}' is an adapter, whose blocks cannot be put into the model. Fix: merge it into its base first"
        for label, expert in experts.items()
        if not isinstance(expert, Model)
    ]
    problems += [f"expert '{label}' has no batches" for label in experts if label not in batches]
    problems += [f"there are batches for '{label}', which is no expert" for label in batches if label not in experts]
    problems += ["an expert cannot be named 'stages' or 'base'" for label in experts if label in ("stages", "base")]
    if problems or not experts:
        raise StatisticsError("Staged statistics cannot be measured.", problems or ["there are no experts"])


def _rebound(base: Binding, expert: Model) -> Binding:
    """The model in memory, bound to an expert of the same names."""
    missing = sorted({s.name for stored in base.located.values() for s in stored.slices} - expert.specs.keys())
    if missing:
        raise StatisticsError(f"{expert.location} lacks {len(missing)} tensors of the base, such as '{missing[0]}'.")
    hashes = {name: content_hash(expert.tensors.read(name)) for name in expert.specs}
    content = hash_names(hashes.items())
    info = ModelInfo(location=expert.location, architecture=base.info.architecture, content=content, tensors=hashes)
    return replace(base, info=info)


def _is_measured(part: Path, model: ModelInfo, details: Mapping[str, str]) -> bool:
    """True if the statistics are there.

    Raises:
        StatisticsError: they are of another model or of other settings.
    """
    if not part.exists():
        return False
    with open_statistics(part) as statistics:
        data = statistics.header.data[0]
        if statistics.header.model.content != model.content or dict(data.details) != dict(details):
            raise StatisticsError(
                f"{part} contains statistics of other models or settings. Likely cause: an earlier call wrote "
                "to the same folder. Fix: use another folder, or delete the old one."
            )
    return True


def _write(checkpoint: Model, names: Sequence[str], folder: Path) -> None:
    """Some tensors of a checkpoint as one of its own, with its config."""
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({n: checkpoint.tensors.read(n) for n in names}, folder / "model.safetensors", {"format": "pt"})
    if checkpoint.config:
        (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
