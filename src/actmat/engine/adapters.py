"""Execute the plan of a merged adapter: module by module, in the space of the factors.

    D* = rule(b_1 a_1, ..., b_T a_T) = b a,   cut or padded to the planned rank,   A = a, B = scale * b, alpha = r

Shapes: `O` out_features, `I` in_features, `R` rank, `E` stacked experts. The small matrices are float64, the factors
are rounded once, to the output dtype.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.apply import generator_for
from actmat.engine.memory import Budget
from actmat.engine.naming import named_errors
from actmat.engine.resources import Resources, one_thread
from actmat.engine.statistics import RuleStatistics, check_adapters
from actmat.engine.survey import SurveyKey, survey_key
from actmat.engine.watch import WATCHED, SinkSource, Watch
from actmat.errors import CheckpointError, NumericalError
from actmat.experts.lora.adapter import Adapter
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.caps import cap_lowrank
from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, Truncated, frobenius_norm, truncate, weighted_sum
from actmat.methods import get_method
from actmat.plan.adapter_model import AdapterPlan, ExtraPlan, ModulePlan
from actmat.plan.measured import Measured

__all__ = ["AdapterJob", "check_finite", "execute_adapters"]


@dataclass
class AdapterJob:
    """One output: its plan, its file, the records of modules that an earlier run finished, who watches each module."""

    plan: AdapterPlan
    writer: SinkSource
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    on_record: Callable[[dict[str, Any]], None] = lambda record: None
    watch: Callable[[ModulePlan], Watch] | None = None


def execute_adapters(
    jobs: Sequence[AdapterJob],
    adapters: Sequence[Adapter],
    resources: Resources,
    *,
    measured: Measured | None = None,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> None:
    """Carry out plans over the same adapters; `job.done` holds the records of all modules afterwards.

    Raises:
        StatisticsError: statistics of another state of an adapter.
        CheckpointError: NaN or Inf in an adapter; all of them are listed.
    """
    check_finite(dict(zip(jobs[0].plan.recipe.labels, adapters, strict=True)))
    if measured is not None:
        check_adapters(measured.labels, adapters, measured)
    budget = Budget(resources.memory)

    def work(job: AdapterJob, item: ModulePlan | ExtraPlan, surveys: Mapping[SurveyKey, Any]) -> None:
        began = time.perf_counter()
        with budget.hold(item.peak_bytes), torch.no_grad():
            watch = None
            if isinstance(item, ModulePlan):
                watch = None if job.watch is None else job.watch(item)
                survey = surveys.get(survey_key(item.call))
                tensors, stats = _module(job.plan, item, adapters, survey, measured, watch)
            else:
                tensors, stats = {item.output: _mean(item, adapters)}, {}
            record: dict[str, Any] = {"name": item.name, "hashes": {}, "stats": stats}
            for name, tensor in tensors.items():
                sink = job.writer.sink(name)
                sink.write(raw_bytes(_rounded(name, tensor, torch_dtype(job.plan.dtype))))
                record["hashes"][name] = sink.digest
            record["hash"] = hash_names(record["hashes"].items())
            if watch is not None:
                record[WATCHED] = watch.finish()
            record["seconds"] = round(time.perf_counter() - began, 6)
        job.on_record(record)
        job.done[item.name] = record
        progress(item.name, sum(t.numel() * t.itemsize for t in tensors.values()))

    with one_thread(), concurrent.futures.ThreadPoolExecutor(resources.workers, "actmat") as pool:
        for job in jobs:
            todo = [t for t in job.plan.tensors if t.name not in job.done]
            surveys = _surveys(job.plan, adapters) if todo else {}
            try:
                for future in [pool.submit(work, job, item, surveys) for item in todo]:
                    future.result()
            except BaseException:  # whatever it is (Ctrl-C too): start no new ones, pass it on
                pool.shutdown(cancel_futures=True)
                raise


def check_finite(adapters: Mapping[str, Adapter]) -> None:
    """Read every stored tensor once: adapters are small, and one message must name all bad values.

    Raises:
        CheckpointError: NaN or Inf.
    """
    problems = [text for label, adapter in adapters.items() for text in adapter.check_values(label)]
    if problems:
        raise CheckpointError(f"The adapters hold values that cannot be merged: {len(problems)} problem(s).", problems)


def _module(
    plan: AdapterPlan,
    item: ModulePlan,
    adapters: Sequence[Adapter],
    survey: Any,
    measured: Measured | None,
    watch: Watch | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Output tensors of one module, and what is worth recording."""
    deltas = module_deltas(item, adapters, torch.float64)
    stats: dict[str, Any] = {}
    parts: list[LowRank] = []
    for k, (label, part) in enumerate(_parts(item, deltas)):
        statistics = None
        if item.grams and measured is not None:
            dtype = torch.float64 if item.factored else torch_dtype(plan.recipe.compute_dtype)
            rule, width = RuleStatistics(measured, plan.recipe.gram_mean), item.shape[-1]
            statistics = rule.of_keys(get_method(item.call.method), item.grams[k], width, dtype)
        with named_errors("module", item.name, item.call.method):
            value, found = _merge(plan, item, part, label, survey, statistics)
            value, capped = _cap(plan, item, value, part)
        parts.append(value)
        if watch is not None:
            watch.factored(label, part, value, found)
        if label:
            stats.setdefault("parts", {})[label] = join_stats(found, capped)
        else:
            stats = join_stats(found, capped)
    merged = _packed(item, parts)
    merged = LowRank(merged.b_OR * item.call.scale, merged.a_RI)
    truncated = truncate(merged, item.rank)
    stats = join_stats(stats, _norms(deltas, truncated))
    out = dict(zip((item.a, item.b), _stored(item, truncated.value), strict=True))
    if item.bias is not None:
        out[item.bias] = _bias(item, adapters)
    return out, stats


def module_deltas(item: ModulePlan, adapters: Sequence[Adapter], dtype: torch.dtype) -> list[LowRank]:
    """The experts' deltas of a module; an expert that leaves it alone gives a zero of rank 1."""
    out = []
    for adapter in adapters:
        module = adapter.modules.get(item.name)
        if module is not None:
            out.append(adapter.factors(module, dtype))
        else:
            *batch, rows, columns = item.shape
            out.append(LowRank(torch.zeros(*batch, rows, 1, dtype=dtype), torch.zeros(*batch, 1, columns, dtype=dtype)))
    return out


def _parts(item: ModulePlan, deltas: Sequence[LowRank]) -> Iterator[tuple[str, list[LowRank]]]:
    """Packed maps one by one: their rows are rows of `b`."""
    if not item.blocks:
        yield "", list(deltas)
        return
    layout = TensorLayout(Role.FUSED_LINEAR, "", blocks=item.blocks)
    split = [layout.to_matrices(d.b_OR) for d in deltas]
    for k, block in enumerate(item.blocks):
        yield block.name, [LowRank(s[k], d.a_RI) for s, d in zip(split, deltas, strict=True)]


def _packed(item: ModulePlan, parts: Sequence[LowRank]) -> LowRank:
    """`[b_1 a_1; b_2 a_2; ...]` with block-diagonal `b`, in the order in which the rows are stored."""
    if not item.blocks:
        return parts[0]
    total = sum(p.rank for p in parts)
    wide, start = [], 0
    for part in parts:
        wide.append(torch.nn.functional.pad(part.b_OR, (start, total - start - part.rank)))
        start += part.rank
    layout = TensorLayout(Role.FUSED_LINEAR, "", blocks=item.blocks)
    shape = (*item.shape[:-1], total)
    return LowRank(layout.from_matrices(wide, shape), torch.cat([p.a_RI for p in parts], dim=-2))


def _merge(
    plan: AdapterPlan, item: ModulePlan, deltas: list[LowRank], label: str, survey: Any, statistics: Any
) -> tuple[LowRank, dict[str, Any]]:
    method, call = get_method(item.call.method), item.call
    needs: dict[str, Any] = {"weights": call.weights} if method.is_weighted else {}
    if method.is_random:
        needs["generator"] = generator_for(plan.recipe.seed, item.name, label)
    if "survey" in method.needs:
        needs["survey"] = survey
    if statistics is not None:
        needs["statistics"] = statistics
    if item.factored:
        assert method.merge_lowrank is not None
        factored = method.merge_lowrank(deltas, **needs, **call.options)
        return factored.value.to(torch.float64), dict(factored.stats)
    dtype = torch_dtype(plan.recipe.compute_dtype)
    merged = method.merge([d.dense().to(dtype) for d in deltas], **needs, **call.options)
    return _as_factors(merged.value.to(torch.float64)), dict(merged.stats)


def _cap(
    plan: AdapterPlan, item: ModulePlan, value: LowRank, deltas: Sequence[LowRank]
) -> tuple[LowRank, dict[str, Any]]:
    """The recipe's caps on one matrix; on each of a stack of experts, as a full model has them."""
    caps = plan.recipe.postprocess
    if not caps.caps:
        return value, {}
    limits: dict[str, Any] = {
        "norm_cap": caps.norm_cap,
        "singular_value_cap": None if item.is_table else caps.singular_value_cap,
    }
    if value.b_OR.ndim == 2:
        return cap_lowrank(value, deltas, **limits)
    capped, stats = [], []
    for e in range(value.b_OR.shape[0]):
        one, *own = (LowRank(d.b_OR[e], d.a_RI[e]) for d in (value, *deltas))
        found, said = cap_lowrank(one, own, **limits)
        capped.append(found)
        stats.append(said)
    stacked = LowRank(torch.stack([c.b_OR for c in capped]), torch.stack([c.a_RI for c in capped]))
    return stacked, {"caps": {str(e): s for e, s in enumerate(stats)}}


def join_stats(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both records in one; the retries of both."""
    retries = [name for stats in (one, other) if "retries" in stats for name in stats["retries"].split(", ")]
    return {**one, **other, **retry_stats(retries)}


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the output dtype.

    Raises:
        NumericalError: values that are not finite, or beyond the range of the dtype.
    """
    out = tensor.to(dtype).contiguous()
    if not bool(torch.isfinite(out).all()):
        finite = bool(torch.isfinite(tensor).all())
        raise NumericalError(
            f"tensor '{name}' has values beyond {dtype}'s range; write with --dtype bfloat16 or float32"
            if finite
            else f"tensor '{name}' came out with NaN or Inf for finite factors. Likely cause: options out of "
            "proportion to the deltas; try other options, or another method for this module"
        )
    return out


def _as_factors(delta_OI: Tensor) -> LowRank:
    rows, columns = delta_OI.shape[-2:]
    one = torch.eye(min(rows, columns), dtype=delta_OI.dtype).expand(*delta_OI.shape[:-2], -1, -1)
    return LowRank(delta_OI, one) if columns <= rows else LowRank(one, delta_OI)


def _stored(item: ModulePlan, value: LowRank) -> tuple[Tensor, Tensor]:
    """A and B as PEFT stores them, see `experts.lora.modules`."""
    if item.kind == "embedding":
        return value.b_OR.mT, value.a_RI.mT
    if item.kind == "convolution":
        ones = (1,) * (len(item.kernel) - 1)
        return value.a_RI.reshape(-1, *item.kernel), value.b_OR.reshape(*value.b_OR.shape, *ones)
    if len(item.shape) == 3:
        return value.a_RI.flatten(0, 1), value.b_OR.permute(1, 2, 0).flatten(1)
    return value.a_RI, value.b_OR


def _norms(deltas: Sequence[LowRank], truncated: Truncated) -> dict[str, Any]:
    """Norms that tell a plain sum from a compromise, and what the truncation left out."""
    total = weighted_sum(deltas, [1.0] * len(deltas))
    return {
        "norm": truncated.norm,
        "expert_norms": [frobenius_norm(d) for d in deltas],
        "sum_norm": frobenius_norm(total),
        "numerical_rank": truncated.rank,
        "error_norm": truncated.error,
        "relative_error": truncated.error / truncated.norm if truncated.norm else 0.0,
        **retry_stats(truncated.retries),
    }


def _bias(item: ModulePlan, adapters: Sequence[Adapter]) -> Tensor:
    """Mean of what the experts add to the layer's bias; an expert without it adds nothing."""
    total = torch.zeros(item.shape[-2], dtype=torch.float64)
    weights = item.call.weights or (1.0,) * len(adapters)
    for adapter, weight in zip(adapters, weights, strict=True):
        module = adapter.modules.get(item.name)
        delta = None if module is None else adapter.bias_delta(module, torch.float64)
        if delta is not None:
            total.add_(delta, alpha=weight)
    return total / math.fsum(weights)


def _mean(item: ExtraPlan, adapters: Sequence[Adapter]) -> Tensor:
    weights = item.weights or (1.0,) * len(adapters)
    found = [(a, s, w) for a, s, w in zip(adapters, item.sources, weights, strict=True) if s is not None]
    share = math.fsum(w for _, _, w in found)
    total = torch.zeros(item.shape, dtype=torch.float64)
    for adapter, source, weight in found:
        total.add_(adapter.weights.read(source).to(torch.float64), alpha=weight / share)
    return total


def _surveys(plan: AdapterPlan, adapters: Sequence[Adapter]) -> dict[SurveyKey, Any]:
    """The passes over all modules that some rules want before the first is merged."""
    groups: dict[SurveyKey, list[ModulePlan]] = {}
    for item in plan.modules:
        survey = get_method(item.call.method).survey
        if survey is not None and survey.applies(item.call.options):
            groups.setdefault(survey_key(item.call), []).append(item)
    out = {}
    for key, items in groups.items():
        call = items[0].call
        survey = get_method(call.method).survey
        assert survey is not None
        state = survey.start(len(adapters), call.options)
        again = True
        while again:
            for item in items:
                for _, part in _parts(item, module_deltas(item, adapters, torch.float64)):
                    dtype = torch_dtype(plan.recipe.compute_dtype)
                    shown: Any = part if item.factored else [d.dense().to(dtype) for d in part]
                    survey.observe(state, shown, call.options)
            again = survey.advance(state)
        out[key] = survey.finish(state)
    return out
