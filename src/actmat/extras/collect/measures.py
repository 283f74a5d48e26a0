"""Measures: running sums over batches, a class for each kind of statistics (`MEASURES`).

Gram matrices are sums of outer products, half of the symmetric matrix, in matrix products:

    G = sum_n z_n z_n^T        over the rows `z_n` of all batches that were added

Every batch is one float32 product per block of rows of the lower triangle, added to a float64 sum; entries above the
diagonal blocks are not computed.

The diagonal Fisher sums, over samples, the squared gradient of the log-likelihood of a label:

    F_i = sum_n ( d log p(y_n | x_n) / d w_i )^2,      y_n drawn from p(. | x_n)  or  given with the data

Labels drawn from the model's own predictions give the Fisher; given labels the "empirical" one (F. Kunstner, L. Balles,
P. Hennig, "Limitations of the empirical Fisher approximation", 2019). For language models `log p` is that of a
sequence: the sum over its tokens, padding left out.

Shapes: `N` rows (tokens), `I` in_features, `G` groups of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmat.checkpoints.base import TensorSpec
from actmat.errors import StatisticsError
from actmat.extras.collect.batches import Batch, named_tensors
from actmat.extras.collect.binding import Binding
from actmat.extras.collect.inputs.layer_inputs import LayerInputs
from actmat.extras.collect.settings import FLOATS, Labels, Settings
from actmat.statistics.header import GramInfo, GramOf, SumInfo, content_hash
from actmat.statistics.kinds import BLOCK, SumKind, get_kind, packed_shape, packed_size


@dataclass(frozen=True)
class Run:
    """A model to be measured, its binding to a checkpoint, and the settings of the measurement."""

    model: nn.Module
    binding: Binding
    settings: Settings


class StoredTensors:
    """Tensors to store: their specs, and functions that compute their values; floating-point ones in `dtype`."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.specs: list[TensorSpec] = []
        self.make: dict[str, Callable[[], Tensor]] = {}

    def add(self, name: str, shape: Sequence[int], make: Callable[[], Tensor], dtype: str | None = None) -> str:
        """Add a tensor, which `make` computes whenever it is asked for; return the hash of its bytes."""
        self.specs.append(TensorSpec(name, tuple(shape), dtype or self.dtype, ""))
        self.make[name] = make
        return content_hash(make())


class Measure(Protocol):
    """Running sums of one kind over batches."""

    def add(self, batch: Batch) -> None:
        """Add a batch."""

    def store(self, out: StoredTensors) -> dict[str, Any]:
        """Add the sums to the tensors to store; return their fields of the header."""

    def close(self) -> None:
        """Remove hooks from the model, also after an error."""


def store_sums(
    kind: str, count: int, sums: Mapping[str, Tensor], out: StoredTensors, details: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Store one sum per tensor for a `SumKind`; return its fields of the header.

    Args:
        count: divisor of the mean.
        sums: name of a stored tensor -> sum.
        details: settings that must agree in files that are added up.
    """
    declared, dtype = get_kind(kind), FLOATS[out.dtype]
    assert isinstance(declared, SumKind)
    hashes = {n: out.add(f"{kind}.{n}", v.shape, partial(_stored, v, dtype)) for n, v in sums.items()}
    return declared.fields(SumInfo(count=count, tensors=hashes, details=dict(details or {})))


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).contiguous()


class GramSum:
    """A running `sum z z^T` of width `I`, always in float64.

    `groups` (a convolution's) is the number of independent sums; rows then have the shape `N G I`. The products are in
    `dtype`, float32 or float64.
    """

    def __init__(
        self, width: int, groups: int = 1, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.width = width
        self.groups = groups
        self.rows = 0
        self._dtype = dtype
        self._starts = range(0, width, BLOCK)
        shapes = [(min(BLOCK, width - s), min(s + BLOCK, width)) for s in self._starts]
        # float64 is unknown to some accelerators; there the sums stay on the CPU
        self._home = torch.device(device) if torch.device(device).type in ("cpu", "cuda") else torch.device("cpu")
        self._sums = [torch.zeros(groups, *s, dtype=torch.float64, device=self._home) for s in shapes]

    def add(self, rows_NI: Tensor) -> None:
        """Add rows, `N I` (`N G I` for groups)."""
        rows = rows_NI.detach().to(self._dtype)
        rows_GNI = rows.unsqueeze(0) if rows.ndim == 2 else rows.transpose(0, 1)
        self.rows += rows_GNI.shape[1]
        for start, total in zip(self._starts, self._sums, strict=True):
            stop = start + total.shape[1]
            product = rows_GNI[..., start:stop].mT @ rows_GNI[..., :stop]
            total.add_(product.to(self._home))

    def packed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The lower triangle: `I(I+1)/2` entries, or `G` times as many, on the CPU."""
        out = torch.empty(self.groups, packed_size(self.width), dtype=dtype)
        for start, total in zip(self._starts, self._sums, strict=True):
            block = total.to("cpu", dtype)
            for r in range(total.shape[1]):
                i = start + r
                out[:, packed_size(i) : packed_size(i + 1)] = block[:, r, : i + 1]
        return out if self.groups > 1 else out[0]

    def nonfinite(self) -> bool:
        """Return True if a NaN or infinity was added: a sum of squares keeps it."""
        return not all(bool(torch.isfinite(s.sum())) for s in self._sums)


class GramMeasure(LayerInputs[GramSum]):
    """Gram matrices of layer inputs, and look-ups of tables."""

    def __init__(self, run: Run) -> None:
        settings = run.settings
        own = next((p.device for p in run.binding.weights().values()), torch.device("cpu"))
        device = torch.device(settings.sums_on) if settings.sums_on else own

        def make(width: int, groups: int) -> GramSum:
            return GramSum(width, groups, dtype=FLOATS[settings.compute_dtype], device=device)

        super().__init__(run.model, run.binding, make, share=settings.share, mask=settings.mask, only=settings.only)

    def store(self, out: StoredTensors) -> dict[str, Any]:
        """Store the packed sums and the counts.

        Raises:
            StatisticsError: a sum is not finite.
        """
        grams: dict[str, GramInfo] = {}
        places: dict[str, list[GramOf]] = {}
        bad: list[str] = []
        for named in self.sums():
            total = named.sum
            if total.nonfinite():
                bad.append(f"the inputs of '{named.parameter}' hold NaN or Inf")
                continue
            shape = packed_shape(total.width, total.groups)
            digest = out.add(f"gram.{named.key}", shape, partial(total.packed, FLOATS[out.dtype]))
            stack = named.parameter if named.parameter in self.tokens else None
            size = {"width": total.width, "groups": total.groups, "rows": total.rows}
            grams[named.key] = GramInfo(**size, stack=stack, hash=digest)
            for r in named.readers:
                rows = None if r.rows is None else list(r.rows)
                places.setdefault(r.parameter, []).append(GramOf(gram=named.key, expert=r.expert, rows=rows))
        if bad:
            raise StatisticsError(f"The model gives values that are not finite: {len(bad)} problem(s).", bad)
        counts: dict[str, str] = {}
        for parameter, found in self.counts.items():
            for piece in self._binding.located[parameter].slices:
                name = f"counts.{piece.name}"
                counts[piece.name] = out.add(name, found.shape, found.contiguous, "int64")
        return {
            "grams": grams,
            "places": {n: places[n] for n in sorted(places)},
            "stacks": dict(self.tokens),
            "absent": self.absent(set(places)),
            "counts": counts,
        }


class FisherMeasure:
    """Running sums of squared per-sample gradients of all floating-point parameters."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parameters = {n: p for n, p in run.binding.parameters.items() if p.is_floating_point()}
        self._sums = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in self._parameters.items()}
        self._samples = 0
        self._generator = torch.Generator("cpu").manual_seed(run.settings.seed)

    def add(self, batch: Batch) -> None:
        """Add every sample of a batch, one backward pass each."""
        if self._run.settings.loss is None and not isinstance(batch, Mapping):
            raise StatisticsError("The Fisher of batches without names needs loss=.")
        tensors = named_tensors(batch)
        before = {n: p.requires_grad for n, p in self._parameters.items()}
        try:
            for parameter in self._parameters.values():
                parameter.requires_grad_(True)
            n_samples = next(iter(tensors.values())).shape[0]
            for n in range(n_samples):
                one = {k: v[n : n + 1] if v.ndim and v.shape[0] == n_samples else v for k, v in tensors.items()}
                self._add_sample(self._run.model, one)
        finally:
            for name, parameter in self._parameters.items():
                parameter.requires_grad_(before[name])
                parameter.grad = None

    def close(self) -> None:
        """Nothing to remove."""

    def store(self, out: StoredTensors) -> dict[str, Any]:
        """Store the sums by stored tensor."""
        sums = {n: part for name, total in self._sums.items() for n, part in self._run.binding.stored(name, total)}
        return store_sums("fisher", self._samples, sums, out, {"labels": self._run.settings.fisher_labels})

    def _add_sample(self, model: nn.Module, sample: Mapping[str, Tensor]) -> None:
        settings = self._run.settings
        with torch.enable_grad():
            if settings.loss is not None:
                value = settings.loss(model, sample)
            else:
                value = log_likelihood(model(**sample), sample, settings.fisher_labels, self._generator)
        gradients = torch.autograd.grad(value, list(self._parameters.values()), allow_unused=True)
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                self._sums[name].add_(gradient.detach().cpu().double().square())
        self._samples += 1


def log_likelihood(output: Any, batch: Mapping[str, Tensor], labels: Labels, generator: torch.Generator) -> Tensor:
    """Log-likelihood of labels under the logits of one sample.

    Classes: `log p(y | x)`. Sequences of logits: the sum over positions; for a decoder with given labels, those labels
    (shifted by one in causal models), -100 left out; drawn labels are drawn at every position that is a token.
    """
    logits = getattr(output, "logits", None)
    if logits is None:
        raise StatisticsError(
            f"The model's output ({type(output).__name__}) has no logits, so that the likelihood of a label is not "
            "known. Collect with a model class that has a head, or pass loss= from Python."
        )
    log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
    if labels == "given":
        if "labels" not in batch:
            raise StatisticsError("Fisher with given labels needs 'labels' in every batch; found " + ", ".join(batch))
        target = batch["labels"]
        if log_p.ndim == 3 and "decoder_input_ids" not in batch and not hasattr(output, "encoder_last_hidden_state"):
            log_p, target = log_p[:, :-1], target[:, 1:]
        return -functional.nll_loss(log_p.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="sum")
    drawn = torch.multinomial(log_p.detach().exp().flatten(0, -2).cpu(), 1, generator=generator).to(log_p.device)
    chosen = log_p.flatten(0, -2).gather(1, drawn).squeeze(1)
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    if log_p.ndim == 3 and isinstance(mask, Tensor) and mask.shape == log_p.shape[:2]:
        chosen = chosen[mask.flatten().bool()]
    total: Tensor = chosen.sum()
    return total


MEASURES: dict[str, Callable[[Run], Measure]] = {"gram": GramMeasure, "fisher": FisherMeasure}
"""Kind of statistics -> its measure."""
