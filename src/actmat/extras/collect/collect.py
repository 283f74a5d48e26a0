"""Measure a model on data: the public `collect`, and its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError, StatisticsError
from actmat.experts.locate import OpenInput, locate_in, require_model
from actmat.experts.lora.adapter import Adapter
from actmat.extras.collect.batches import Batch, DataSeen, evaluating
from actmat.extras.collect.binding import Binding, bind, transformers_model, with_adapter
from actmat.extras.collect.files import check_output, write_statistics
from actmat.extras.collect.measures import FisherMeasure, GramMeasure, Measure, Measurement, Settings, StoredTensors
from actmat.statistics.header import DataInfo, StatisticsHeader
from actmat.version import __version__


@dataclass(frozen=True)
class Collected:
    """Statistics in memory."""

    header: StatisticsHeader
    tensors: Mapping[str, Tensor]  # sums and counts by name

    def save(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Write the folder `out`; it appears whole or not at all."""
        specs = [TensorSpec(n, t.shape, str(t.dtype).removeprefix("torch."), "") for n, t in self.tensors.items()]
        write_statistics(Path(out), self.header, specs, self.tensors.__getitem__, overwrite=overwrite)
        return Path(out)


def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    checkpoint: str | Path | Model | None = None,
    adapter: str | Path | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda samples, tokens: None,
    **options: Any,
) -> Collected:
    """Run a model over batches and sum up statistics, by default `G = sum z z^T` of every layer's input.

    >>> inputs = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> found = collect(nn.Linear(2, 3), [inputs])
    >>> found.tensors["gram.weight"]  # half of inputs.T @ inputs
    tensor([1., 2., 5.])

    Args:
        model: any module; transformers models and PEFT models on them are recognized, with their padding masks.
        batches: mappings (keyword arguments of the model), tuples (positional ones) or single tensors.
        checkpoint: the checkpoint of the model, so that statistics have its names and hashes. Default: the one that
            a transformers model names; any other model is recorded under its own names.
        adapter: the adapter on the model, if PEFT put one on; it is bound by hash as well.
        out: folder to write, if any.
        overwrite: replace earlier statistics at `out`.
        progress: called after each batch with the samples and tokens so far.
        options: fields of `Settings`.

    Raises:
        StatisticsError: the model is not its checkpoint, an activation is NaN or Inf, or nothing was measured.
    """
    settings = Settings(**options)
    if out is not None:
        check_output(Path(out), overwrite=overwrite)
    with bound(model, checkpoint, adapter) as binding:
        result = measured(Measurement(model, binding, settings), batches, progress)
    if out is not None:
        result.save(out, overwrite=overwrite)
    return result


def measured(
    run: Measurement, batches: Iterable[Batch], progress: Callable[[int, int], None] = lambda samples, tokens: None
) -> Collected:
    """`collect` of a model whose binding to a checkpoint the caller answers for."""
    seen = DataSeen()
    with evaluating(run.model), _observable(run.model), contextlib.ExitStack() as stack:
        measures: list[Measure] = []
        for kind, wanted in ((GramMeasure, run.settings.gram), (FisherMeasure, run.settings.fisher)):
            if wanted:
                measures.append(kind(run))
                stack.callback(measures[-1].close)
        for batch in batches:
            seen.add(batch)
            for measure in measures:
                measure.add(batch)
            progress(seen.samples, seen.tokens)
        return _result(run, seen, measures)


@contextlib.contextmanager
def bound(
    model: nn.Module,
    checkpoint: str | Path | Model | None,
    adapter: str | Path | None,
    same: Binding | None = None,
) -> Iterator[Binding]:
    """The model bound to its checkpoint and adapter, which are open for the duration, or longer if given open.

    Args:
        same: of the same model with another adapter, which changed no parameter of its own; nothing is compared then.
    """
    with contextlib.ExitStack() as stack:
        on_top = None if adapter is None else _adapter(locate_in(stack, adapter))
        if same is not None:
            assert on_top is not None, "an adapter was switched"
            yield with_adapter(same, on_top)
            return
        if checkpoint is None:
            checkpoint = _named_checkpoint(model)
        if checkpoint is not None and not isinstance(checkpoint, Model):
            checkpoint = require_model(locate_in(stack, checkpoint))
        if adapter is None:
            _check_no_adapter(model)
        yield bind(model, checkpoint, on_top)


def _adapter(located: OpenInput) -> Adapter:
    if isinstance(located, Model):
        raise CheckpointError(f"{located.location}: expected an adapter, found a full checkpoint")
    return located


def _named_checkpoint(model: nn.Module) -> str | None:
    """The checkpoint that a transformers model says it was loaded from; None for any other model."""
    inner = transformers_model(model)
    if inner is None or inner.config is None:
        return None
    location = getattr(inner.config, "name_or_path", "") or ""
    if not location:
        raise StatisticsError(
            "The model was built in memory: save it (save_pretrained) and pass checkpoint=, so that the statistics "
            "carry the names and hashes of what will be merged."
        )
    return str(location)


def _check_no_adapter(model: nn.Module) -> None:
    if isinstance(getattr(model, "peft_config", None), dict):
        active = getattr(model, "active_adapter", None)
        raise StatisticsError(
            f"The model carries the adapter '{active}': pass adapter= with the folder that it was loaded from, so that "
            "the statistics are bound to its state."
        )


@contextlib.contextmanager
def _observable(model: nn.Module) -> Iterator[None]:
    """Attention and experts of a mixture computed in operations that can be observed, for the duration."""
    fast = torch.backends.mha.get_fastpath_enabled()
    switch: Any = getattr(model, "set_experts_implementation", lambda name: None)
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None) or "eager"
    torch.backends.mha.set_fastpath_enabled(False)
    if experts != "eager":
        switch("eager")
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        if experts != "eager":
            switch(experts)


def _result(run: Measurement, seen: DataSeen, measures: Sequence[Measure]) -> Collected:
    """StatisticsHeader and tensors of everything that was measured."""
    if not seen.samples:
        raise StatisticsError("No batches were given to measure the model on.")
    data = DataInfo(
        source=run.settings.source,
        fingerprint=seen.fingerprint(),
        samples=seen.samples,
        tokens=seen.tokens,
        details={**(run.settings.details or {}), **({"inputs": "images"} if seen.of_images else {})},
    )
    out = StoredTensors()
    fields = {name: value for measure in measures for name, value in measure.store(out).items()}
    header = StatisticsHeader(
        model=run.binding.info,
        data=[data],
        samples=data.samples,
        tokens=data.tokens,
        memory=run.binding.renamed(),
        versions={"actmat": __version__, "torch": torch.__version__},
        **fields,
    )
    if not header.kinds:
        raise StatisticsError("Nothing was measured: no layer of the model read an input.", header.absent.values())
    return Collected(header, out)
