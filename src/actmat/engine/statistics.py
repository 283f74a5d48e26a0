"""Hand statistics to the rules: read when asked for, one tensor at a time, and never those of another model.

Shapes: `I` in_features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint
from actmat.engine.findings import Findings
from actmat.engine.ties import content_hash
from actmat.errors import StatisticsError
from actmat.experts.base import Expert
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.expert import AdapterExpert, is_formed
from actmat.methods import MergeMethod
from actmat.plan.measured import Measured, gram_keys
from actmat.plan.model import TensorPlan
from actmat.plan.parts import Part
from actmat.statistics.binding import adapter_content
from actmat.statistics.store import Mean, Statistics

__all__ = ["FOREIGN", "RuleStatistics", "check_adapters", "check_models", "check_probes"]


@dataclass(frozen=True)
class RuleStatistics:
    """The statistics of all experts, as the rules of one merge want them."""

    measured: Measured
    mean: Mean

    def of_part(
        self,
        method: MergeMethod,
        item: TensorPlan,
        part: Part,
        k: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Mapping[str, Sequence[Tensor]]:
        """What a rule needs for matrix `k` of a part (the whole part, for a rule on tensors)."""
        if "fisher" in method.needs_statistics:
            lazy = _Lazy(self.measured.files, item.sources, "fisher", self.mean, dtype, device, ())
            return {"fisher": _held(method, lazy)}
        keys = gram_keys(self.measured, item.sources, item.shape, item.layout, part, k)
        width = part.layout.matrix_shapes(part.shape)[k][-1]
        return self.of_keys(method, keys, width, dtype, device)

    def of_keys(
        self,
        method: MergeMethod,
        keys: Sequence[str | None],
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Mapping[str, Sequence[Tensor]]:
        """Gram matrices by key, one per expert; None stands for zeros."""
        lazy = _Lazy(self.measured.files, keys, "gram", self.mean, dtype, device, (width, width))
        return {"gram": _held(method, lazy)}


def _held(method: MergeMethod, lazy: _Lazy) -> Sequence[Tensor]:
    """A rule that walks over the experts once gets them one at a time; any other may ask again, so they are kept."""
    return lazy if method.one_pass else list(lazy)


class _Lazy(Sequence[Tensor]):
    """One tensor per expert, read when it is asked for."""

    def __init__(
        self,
        files: Sequence[Statistics | None],
        names: Sequence[str | None],
        kind: str,
        mean: Mean,
        dtype: torch.dtype,
        device: torch.device | str,
        zeros: tuple[int, ...],
    ) -> None:
        self._files, self._names, self._kind, self._mean = files, names, kind, mean
        self._dtype, self._device, self._zeros = dtype, device, zeros

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        if not 0 <= t < len(self._files):
            raise IndexError(t)
        file, name = self._files[t], self._names[t]
        assert file is not None, "the plan saw to it"
        if name is None:
            return torch.zeros(self._zeros, dtype=self._dtype, device=self._device)
        if self._kind == "fisher":
            return file.fisher(name, dtype=self._dtype).to(self._device)
        return file.gram(name, mean=self._mean, dtype=self._dtype).to(self._device)


PROBES = 8
"""Tensors per expert that are compared before the work begins: the smallest, norms and biases as a rule."""

FOREIGN = (
    "Statistics are not of the models that are merged; collect them again (actmat statistics collect), or give the "
    "experts that they were measured on."
)


def check_probes(base: Checkpoint, experts: Sequence[Expert], measured: Measured) -> None:
    """Compare a few small tensors before hours of work; every tensor is compared when it is read.

    Raises:
        StatisticsError: statistics of another model; every expert that is concerned is listed.
    """
    problems = []
    for label, file, expert in zip(measured.labels, measured.files, experts, strict=True):
        if file is None:
            continue
        adapted = isinstance(expert, AdapterExpert)
        checkpoint, who = (base, "the base") if adapted else (expert, f"expert '{label}'")
        known = file.header.model.tensors
        names = sorted((n for n in checkpoint.specs if n in known), key=lambda n: (checkpoint.specs[n].nbytes, n))
        found = {n: content_hash(checkpoint, n) for n in names[:PROBES]}
        other = [n for n in found if found[n] != known[n]]
        if other:
            problems.append(_foreign(other[0], who, found[other[0]], label, file))
    if problems:
        raise StatisticsError(FOREIGN, problems)


def _foreign(name: str, who: str, found: str, label: str, file: Statistics) -> str:
    return (
        f"tensor '{name}' of {who} has content {found}; the statistics of '{label}' ({file.location}) were measured "
        f"with {file.header.model.tensors[name]}"
    )


def check_models(
    item: TensorPlan,
    experts: Sequence[Expert],
    measured: Measured,
    base_hash: str,
    expert_hashes: Sequence[str],
    findings: Findings,
) -> None:
    """Compare the hashes of a tensor that was just read with those that its statistics were measured on."""
    for label, file, expert, source, digest in zip(
        measured.labels, measured.files, experts, item.sources, expert_hashes, strict=False
    ):
        if file is None:
            continue
        on_base = is_formed(expert, source)
        if isinstance(expert, AdapterExpert) and not on_base:
            continue  # the adapter's own tensor: its hash was compared with the adapter's
        name, found = (item.name, base_hash) if on_base else (source, digest)
        expected = file.header.model.tensors.get(name)
        if expected is not None and expected != found:
            who = "the base" if on_base else f"expert '{label}'"
            findings.add_foreign_statistics(_foreign(name, who, found, label, file))


def check_adapters(labels: Sequence[str], adapters: Sequence[Adapter | None], measured: Measured) -> None:
    """Compare the state of every adapter with the one that its statistics were measured on.

    Raises:
        StatisticsError: another state; all of them are listed.
    """
    problems = []
    for label, adapter, file in zip(labels, adapters, measured.files, strict=True):
        if adapter is None or file is None or file.header.model.adapter is None:
            continue
        expected, found = file.header.model.adapter.content, adapter_content(adapter)
        if expected != found:
            problems.append(
                f"the adapter '{label}' ({adapter.location}) has content {found}; its statistics ({file.location}) "
                f"were measured with {expected} ({file.header.model.adapter.location})"
            )
    if problems:
        raise StatisticsError(
            "Statistics are of another state of an adapter; collect them again (actmat statistics collect).", problems
        )
