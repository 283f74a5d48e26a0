"""Measure a model on data: the public `collect`, and what it gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import Checkpoint, TensorSpec
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import StatisticsError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.resolve import open_adapter
from actmat.statistics.binding import Binding, batch_hash, bind
from actmat.statistics.fisher import FisherSum, Labels
from actmat.statistics.gram import GramSum
from actmat.statistics.header import DataInfo, GramInfo, Header, Place
from actmat.statistics.masks import Scope, Scopes
from actmat.statistics.observe import ExpertInputs, Observer
from actmat.statistics.sites import Group, Site, Sites
from actmat.statistics.store import check_place, content_hash, gram_spec, write_statistics
from actmat.version import __version__

__all__ = ["Collected", "collect"]

Batch = Mapping[str, Tensor] | tuple[Tensor, ...] | list[Tensor] | Tensor


@dataclass(frozen=True)
class Collected:
    """What was measured, in memory; `save` writes it down."""

    header: Header
    tensors: Mapping[str, Callable[[], Tensor]]
    specs: list[TensorSpec]

    def save(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Write the folder `out`; it appears whole or not at all.

        Raises:
            OutputError: no room, or something else is there.
        """
        write_statistics(Path(out), self.header, self.specs, lambda name: self.tensors[name](), overwrite=overwrite)
        return Path(out)


def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    checkpoint: str | Path | Checkpoint | None = None,
    adapter: str | Path | None = None,
    out: str | Path | None = None,
    gram: bool = True,
    fisher: bool = False,
    fisher_labels: Labels = "drawn",
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
    compute_dtype: str = "float32",
    dtype: str = "float32",
    share: bool = True,
    seed: int = 0,
    source: str = "batches",
    details: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda samples, tokens: None,
) -> Collected:
    """Run a model over batches and sum up what its layers read: `G = sum z z^T` per input, padding left out.

    Args:
        model: any module; transformers models and PEFT models around them are known by name and mask.
        batches: mappings (keyword arguments of the model), tuples (positional ones) or single tensors.
        checkpoint: what the model was loaded from, so that statistics carry its names and hashes. Default: a
            transformers model says so itself; any other is taken under its own names.
        adapter: the adapter on the model, where PEFT put one on; it is bound by hash as well.
        out: folder to write; None: nothing is written.
        gram: measure Gram matrices and token counts of embeddings.
        fisher: measure the diagonal Fisher, one backward pass per sample.
        fisher_labels: "drawn" from the model's predictions, or "given" with the batches.
        loss: log-likelihood of one sample, in place of the built-in one.
        mask: gives the mask (`B S`, True for tokens) of a batch, for models whose calls do not carry one.
        compute_dtype: dtype of the products, "float32" or "float64"; sums are float64.
        dtype: dtype of the stored sums.
        share: store one Gram for layers that read the same input.
        seed: of the labels that are drawn.
        source, details: where the data is from, for the record.
        overwrite: replace earlier statistics at `out`.
        progress: called after each batch with the samples and tokens so far.

    Raises:
        StatisticsError: the model is not its checkpoint, an activation is NaN or Inf, or nothing was measured.
    """
    if out is not None:
        check_place(Path(out), overwrite=overwrite)
    with _bound(model, checkpoint, adapter) as binding, _ready(model):
        seen = _Seen()
        observed = _Observed(model, binding, compute_dtype, share=share) if gram else None
        squares = FisherSum(binding.parameters, fisher_labels, loss, seed) if fisher else None
        try:
            for batch in batches:
                seen.add(batch)
                if observed is not None:
                    observed.run(model, batch, mask)
                if squares is not None:
                    if loss is None and not isinstance(batch, Mapping):
                        raise StatisticsError("The Fisher of batches without names needs loss=.")
                    squares.add(model, _mapping(batch))
                progress(seen.samples, seen.tokens)
        finally:
            if observed is not None:
                observed.close()
        if not seen.samples:
            raise StatisticsError("There were no batches to measure the model on.")
        data = DataInfo(
            source=source,
            fingerprint=seen.hash.hexdigest(),
            samples=seen.samples,
            tokens=seen.tokens,
            details=dict(details or {}),
        )
        result = _result(binding, observed, squares, data, dtype, fisher_labels)
    if out is not None:
        result.save(out, overwrite=overwrite)
    return result


@contextlib.contextmanager
def _bound(
    model: nn.Module, checkpoint: str | Path | Checkpoint | None, adapter: str | Path | None
) -> Iterator[Binding]:
    with contextlib.ExitStack() as stack:
        if checkpoint is None:
            checkpoint = _own_checkpoint(model)
        opened = None if checkpoint is None else stack.enter_context(open_checkpoint(checkpoint))
        found: Adapter | None = None
        if adapter is None:
            adapter = _own_adapter(model)
        if adapter is not None:
            found = stack.enter_context(open_adapter(adapter))
        yield bind(model, opened, found)


def _own_checkpoint(model: nn.Module) -> str | None:
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    config = getattr(inner, "config", None)
    if not hasattr(inner, "base_model_prefix") or config is None:
        return None
    place = getattr(config, "name_or_path", "") or ""
    if not place:
        raise StatisticsError(
            "The model was built in memory: save it (save_pretrained) and pass checkpoint=, so that the statistics "
            "carry the names and hashes of what will be merged."
        )
    return str(place)


def _own_adapter(model: nn.Module) -> str | None:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return None
    active = getattr(model, "active_adapter", None)
    raise StatisticsError(
        f"The model carries the adapter '{active}': pass adapter= with the folder that it was loaded from, so that the "
        "statistics are bound to its state."
    )


@contextlib.contextmanager
def _ready(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, transparent attention and experts for the duration."""
    training = model.training
    fast = torch.backends.mha.get_fastpath_enabled()
    experts = _experts_implementation(model)
    torch.backends.mha.set_fastpath_enabled(False)
    if experts not in (None, "eager"):
        model.set_experts_implementation("eager")  # type: ignore[operator]
    model.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        if experts not in (None, "eager"):
            model.set_experts_implementation(experts)  # type: ignore[operator]
        model.train(training)


def _experts_implementation(model: nn.Module) -> str | None:
    if not hasattr(model, "set_experts_implementation"):
        return None
    found = getattr(getattr(model, "config", None), "_experts_implementation", None)
    return str(found) if found is not None else None


class _Seen:
    """What went into the model: how much, and its hash."""

    def __init__(self) -> None:
        self.hash = ContentHash()
        self.samples = 0
        self.tokens = 0

    def add(self, batch: Batch) -> None:
        tensors = _mapping(batch)
        if not tensors:
            raise StatisticsError("A batch holds no tensors.")
        batch_hash(tensors, self.hash)
        first = next(iter(tensors.values()))
        self.samples += first.shape[0]
        mask, ids = tensors.get("attention_mask"), tensors.get("input_ids")
        if mask is not None and mask.ndim == 2:
            self.tokens += int(mask.bool().sum())
        else:
            self.tokens += ids.numel() if ids is not None else first.shape[0]


class _Observed:
    """A model under observation."""

    def __init__(self, model: nn.Module, binding: Binding, compute_dtype: str, *, share: bool) -> None:
        wanted = {n: p for n, p in binding.parameters.items() if p.ndim >= 2 and p.is_floating_point()}
        product = {"float32": torch.float32, "float64": torch.float64}[compute_dtype]
        device = next((p.device for p in wanted.values()), torch.device("cpu"))
        self.sites = Sites(lambda width, groups: GramSum(width, groups, dtype=product, device=device), share=share)
        self.scopes = Scopes(model)
        self.experts = ExpertInputs(model, {id(p): n for n, p in wanted.items()}, self.scopes)
        self.observer = Observer(wanted, self.scopes, self.sites)

    def run(self, model: nn.Module, batch: Batch, mask: Callable[[Any], Tensor | None] | None) -> None:
        """One forward pass."""
        if mask is not None:
            found = mask(batch)
            tensors = _mapping(batch).values()
            self.scopes.push(Scope(None if found is None else found.bool(), frozenset(t.shape[0] for t in tensors)))
        try:
            with torch.no_grad(), self.observer:
                if isinstance(batch, Mapping):
                    model(**batch)
                elif isinstance(batch, Tensor):
                    model(batch)
                else:
                    model(*batch)
            self.sites.end_pass()
        finally:
            self.scopes.reset()

    def close(self) -> None:
        """Take all hooks off."""
        self.experts.close()
        self.scopes.close()


def _mapping(batch: Batch) -> dict[str, Tensor]:
    if isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if isinstance(v, Tensor)}
    listed = [batch] if isinstance(batch, Tensor) else batch
    return {str(i): v for i, v in enumerate(listed) if isinstance(v, Tensor)}


def _result(
    binding: Binding,
    observed: _Observed | None,
    squares: FisherSum | None,
    data: DataInfo,
    dtype: str,
    fisher_labels: Labels,
) -> Collected:
    """Names on disk for everything, hashes of what will be stored."""
    store = {"float32": torch.float32, "float64": torch.float64}[dtype]
    out = _Tensors()
    grams: dict[str, GramInfo] = {}
    places: dict[str, list[Place]] = {}
    absent: dict[str, str] = {}
    counts: dict[str, str] = {}
    if observed is not None:
        grams, places = _grams(binding, observed, store, dtype, out)
        absent = _absent(binding, observed, places)
        for name, found in observed.observer.counts.items():
            for piece in binding.places[name].slices:
                spec = TensorSpec(f"counts.{piece.name}", tuple(found.shape), "int64", "")
                counts[piece.name] = out.add(spec, lambda f=found: f)  # type: ignore[misc]
    fisher: dict[str, str] = {}
    if squares is not None:
        for name, total in squares.sums.items():
            for piece in binding.places[name].slices:
                value = total if piece.index is None else total[piece.index]
                value = value if piece.stop is None else value[..., piece.start : piece.stop, :]
                spec = TensorSpec(f"fisher.{piece.name}", tuple(value.shape), dtype, "")
                fisher[piece.name] = out.add(spec, lambda v=value: v.to(store).contiguous())  # type: ignore[misc]
    if not grams and not fisher:
        raise StatisticsError("Nothing was measured: no layer of the model read an input.", absent.values())
    renamed = {p.name: n for n, place in binding.places.items() for p in place.slices if p.name != n}
    header = Header(
        model=binding.info,
        data=[data],
        samples=data.samples,
        tokens=data.tokens,
        grams=grams,
        places=places,
        stacks=dict(observed.experts.tokens) if observed is not None else {},
        memory=renamed,
        absent=absent,
        fisher=fisher,
        fisher_samples=squares.samples if squares is not None else 0,
        fisher_labels=fisher_labels if squares is not None else "",
        counts=counts,
        versions={"actmat": __version__, "torch": torch.__version__},
    )
    return Collected(header, out.make, out.specs)


class _Tensors:
    """Tensors to store: specs, and what makes each when it is written."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.make: dict[str, Callable[[], Tensor]] = {}

    def add(self, spec: TensorSpec, make: Callable[[], Tensor]) -> str:
        """Note one; returns the hash of its bytes."""
        self.specs.append(spec)
        self.make[spec.name] = make
        return content_hash(make())


def _grams(
    binding: Binding, observed: _Observed, store: torch.dtype, dtype: str, out: _Tensors
) -> tuple[dict[str, GramInfo], dict[str, list[Place]]]:
    grams: dict[str, GramInfo] = {}
    places: dict[str, list[Place]] = {}
    bad: list[str] = []
    refused = {**observed.observer.absent, **_mixed_use(observed.sites.groups())}
    for group in observed.sites.groups():
        used = [(s, list(_pieces(binding, s))) for s in group.members if s.parameter not in refused]
        if not used:
            continue
        first = used[0][0]
        key = used[0][1][0][0] + ("" if first.expert is None or len(used[0][1]) > 1 else f".{first.expert}")
        key += "" if first.rows is None else f".{first.rows[0]}"
        while key in grams:
            key += "'"
        if group.sum.nonfinite():
            bad.append(f"the inputs of '{first.parameter}' hold NaN or Inf")
            continue
        stack = first.parameter if first.parameter in observed.experts.tokens else None
        unhashed = GramInfo(
            width=group.sum.width, groups=group.sum.groups, rows=group.sum.rows, stack=stack, hash="0" * 32
        )
        digest = out.add(gram_spec(key, unhashed, dtype), lambda g=group.sum: g.packed(store))  # type: ignore[misc]
        grams[key] = unhashed.model_copy(update={"hash": digest})
        for site, pieces in used:
            for name, expert in pieces:
                rows = None if site.rows is None else list(site.rows)
                places.setdefault(name, []).append(Place(gram=key, expert=expert, rows=rows))
    if bad:
        raise StatisticsError(f"The model gives values that are not finite: {len(bad)} problem(s).", bad)
    return grams, {n: places[n] for n in sorted(places)}


def _pieces(binding: Binding, site: Site) -> Iterator[tuple[str, int | None]]:
    """Stored tensors that a site is about, and the expert inside each, where it is a stack on disk too."""
    for piece in binding.places[site.parameter].slices:
        if piece.index is None:
            yield piece.name, site.expert
        elif piece.index == site.expert:
            yield piece.name, None


def _mixed_use(groups: list[Group]) -> dict[str, str]:
    """Parameters that were used as a whole here and in parts there."""
    uses: dict[str, set[bool]] = {}
    for group in groups:
        for site in group.members:
            uses.setdefault(site.parameter, set()).add(site.rows is None)
    return {n: "it was used as a whole and in parts" for n, kinds in uses.items() if len(kinds) > 1}


def _absent(binding: Binding, observed: _Observed, places: Mapping[str, list[Place]]) -> dict[str, str]:
    """Stored matrices without a Gram, and why."""
    refused = {**observed.observer.absent, **_mixed_use(observed.sites.groups())}
    out: dict[str, str] = {}
    for name, parameter in binding.parameters.items():
        if parameter.ndim < 2:
            continue
        for piece in binding.places[name].slices:
            if piece.name not in places and name not in observed.observer.counts:
                why = "no token of the data was routed to it" if piece.index is not None else "no input of it was seen"
                out[piece.name] = refused.get(name, why)
    return out
