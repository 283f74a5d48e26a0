"""Measures: running sums over batches, a class for each kind of statistics.

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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmat.errors import StatisticsError
from actmat.extras.collect.batches import Batch, call_model, named_tensors
from actmat.extras.collect.binding import Binding
from actmat.extras.collect.inputs.masks import RoutedTokens, Scopes
from actmat.extras.collect.inputs.observer import InputObserver
from actmat.extras.collect.inputs.sums import GramSum, InputSums, LinearMap
from actmat.statistics.header import GramInfo, GramOf, content_hash

Labels = Literal["drawn", "given"]
"""Labels for the Fisher: drawn from the model's predictions, or given with the batches."""

LogLikelihood = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
"""`(model, batch of one sample) -> scalar log-likelihood`."""

FLOATS = {"float32": torch.float32, "float64": torch.float64}
"""dtypes of products and of stored sums."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement."""

    gram: bool = True  # measure Gram matrices and token counts of embeddings
    fisher: bool = False  # measure the diagonal Fisher, one backward pass per sample
    fisher_labels: Labels = "drawn"  # "drawn" from the model's predictions, or "given" with the batches
    loss: LogLikelihood | None = None  # log-likelihood of one sample, in place of the built-in one
    compute_dtype: str = "float32"  # dtype of the products, "float32" or "float64"; sums are float64
    dtype: str = "float32"  # dtype of the stored sums, "float32" or "float64"
    share: bool = True  # store one sum for layers that read the same input
    seed: int = 0  # seed of the labels that are drawn
    source: str = "batches"
    only: Collection[str] | None = None  # parameters to measure, by their names in the model; None: all
    sums_on: str | None = None  # device of the float64 sums of Gram matrices; None: the model's
    details: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Measurement:
    """A model to be measured, its binding to a checkpoint, and the settings of the measurement."""

    model: nn.Module
    binding: Binding
    settings: Settings


class StoredTensors(dict[str, Tensor]):
    """Tensors to store by name."""

    def add(self, name: str, value: Tensor) -> str:
        """Add a tensor; return the hash of its bytes."""
        self[name] = value.contiguous()
        return content_hash(self[name])


class GramMeasure:
    """Gram matrices of the inputs of a model's layers, padding left out, and look-ups of tables.

    Hooks are put on the model until `close`.
    """

    def __init__(self, run: Measurement) -> None:
        settings = run.settings
        self._model, self._binding = run.model, run.binding
        self._dtype = FLOATS[settings.dtype]
        weights = {n: w for n, w in run.binding.weights().items() if settings.only is None or n in settings.only}
        places = {p.device for p in run.binding.weights().values()}  # several: layers wait on the host for their turn
        device = torch.device(settings.sums_on or (places.pop() if len(places) == 1 else "cpu"))
        make = partial(GramSum, dtype=FLOATS[settings.compute_dtype], device=device)
        self._sums = InputSums(make, share=settings.share)
        self._scopes = Scopes(run.model)
        self._routed = RoutedTokens(run.model, {id(p): n for n, p in weights.items()}, self._scopes)
        self._observer = InputObserver(weights, self._scopes, self._sums)

    def add(self, batch: Batch) -> None:
        """Run the model on a batch."""
        try:
            with torch.no_grad(), self._observer:
                call_model(self._model, batch)
            self._sums.end_pass()
        finally:
            self._scopes.reset()

    def close(self) -> None:
        """Remove all hooks."""
        self._routed.close()
        self._scopes.close()

    def store(self, out: StoredTensors) -> dict[str, Any]:
        """Store the packed sums and the counts; return their fields of the header.

        Raises:
            StatisticsError: a sum is not finite.
        """
        grams: dict[str, GramInfo] = {}
        places: dict[str, list[GramOf]] = {}
        bad: list[str] = []
        refused, stacks = self._refused(), self._routed.tokens
        for shared in self._sums.shared():
            used = [(m, self._readers(m)) for m in shared.members if m.parameter not in refused]
            if not used:
                continue
            (first, its_readers), total = used[0], shared.sum
            if total.nonfinite():
                bad.append(f"the inputs of '{first.parameter}' hold NaN or Inf")
                continue
            key = _key_of(first, its_readers, grams)
            digest = out.add(f"gram.{key}", total.stored(self._dtype))
            total.clear()  # the sums are twice as large as what is stored
            stack = first.parameter if first.parameter in stacks else None
            size = {"width": total.width, "groups": total.groups, "rows": total.rows}
            grams[key] = GramInfo(**size, stack=stack, hash=digest)
            for r in (r for _, readers in used for r in readers):
                rows = None if r.rows is None else list(r.rows)
                places.setdefault(r.parameter, []).append(GramOf(gram=key, expert=r.expert, rows=rows))
        if bad:
            raise StatisticsError(f"The model gives values that are not finite: {len(bad)} problem(s).", bad)
        counts: dict[str, str] = {}
        for parameter, lookups in self._observer.counts.items():
            for piece in self._binding.located[parameter].slices:
                counts[piece.name] = out.add(f"counts.{piece.name}", lookups)
        return {
            "grams": grams,
            "places": {n: places[n] for n in sorted(places)},
            "stacks": dict(stacks),
            "absent": self._absent(places, refused),
            "counts": counts,
        }

    def _absent(self, present: Collection[str], refused: Mapping[str, str]) -> dict[str, str]:
        """Stored matrices that are not in `present`, each with the reason."""
        out: dict[str, str] = {}
        for name, parameter in self._binding.parameters.items():
            is_matrix = parameter.ndim >= 2 and name not in self._observer.counts
            for piece in self._binding.located[name].slices if is_matrix else ():
                if piece.name not in present:
                    why = "no input of it was seen" if piece.index is None else "no token of the data was routed to it"
                    out[piece.name] = refused.get(name, why)
        return out

    def _readers(self, linear_map: LinearMap) -> list[LinearMap]:
        """Stored tensors of a linear map; the expert is named if they are stacked on disk as well."""
        slices = self._binding.located[linear_map.parameter].slices
        return [
            LinearMap(s.name, linear_map.expert if s.index is None else None, linear_map.rows)
            for s in slices
            if s.index in (None, linear_map.expert)
        ]

    def _refused(self) -> dict[str, str]:
        """Parameters whose inputs are not known, or that were used in two ways, each with the reason."""
        uses: dict[str, set[bool]] = {}
        for shared in self._sums.shared():
            for member in shared.members:
                uses.setdefault(member.parameter, set()).add(member.rows is None)
        mixed = {n: "it was used as a whole and in parts" for n, kinds in uses.items() if len(kinds) > 1}
        return {**self._observer.absent, **mixed}


def _key_of(first: LinearMap, readers: Sequence[LinearMap], taken: Collection[str]) -> str:
    """Name of a Gram: that of the first stored tensor that reads the input, made unique."""
    key = readers[0].parameter
    key += "" if first.expert is None or len(readers) > 1 else f".{first.expert}"
    key += "" if first.rows is None else f".{first.rows[0]}"
    while key in taken:
        key += "'"
    return key


class FisherMeasure:
    """Running sums of squared per-sample gradients of all floating-point parameters."""

    def __init__(self, run: Measurement) -> None:
        if getattr(run.model, "in_layers", False):
            raise StatisticsError("The Fisher needs the whole model in memory, and this one runs layer by layer.")
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
                sample = {k: v[n : n + 1] if v.ndim and v.shape[0] == n_samples else v for k, v in tensors.items()}
                self._add_sample(self._run.model, sample)
        finally:
            for name, parameter in self._parameters.items():
                parameter.requires_grad_(before[name])
                parameter.grad = None

    def close(self) -> None:
        """Nothing to remove."""

    def store(self, out: StoredTensors) -> dict[str, Any]:
        """Store the sums by stored tensor; return their fields of the header."""
        sums = [stored for name, total in self._sums.items() for stored in self._run.binding.stored(name, total)]
        return {
            "fisher": {n: out.add(f"fisher.{n}", v.to(FLOATS[self._run.settings.dtype])) for n, v in sums},
            "fisher_samples": self._samples,
            "fisher_labels": self._run.settings.fisher_labels,
        }

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


Measure = GramMeasure | FisherMeasure
"""Running sums of one kind over batches: `add` a batch, `store` the sums, `close` to remove hooks."""
