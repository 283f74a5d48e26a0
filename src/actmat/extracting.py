"""Extract an adapter from a fine-tuned model: the best low-rank approximation of the delta of each linear layer.

    D = W - W_0 = U diag(s) V^T,    B = U_r sqrt(s_r),  A = sqrt(s_r) V_r^T,  alpha = r

`r` is given, or the smallest with `sum_(i <= r) s_i^2 >= energy * sum_i s_i^2`. What LoRA cannot hold (norms, tables,
convolutions, biases) is saved whole beside the factors (`modules_to_save`), or left out; the record says which and why.

Source: Eckart and Young (https://doi.org/10.1007/BF02288367); PEFT's `LoraConfig`.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.bounds import read_object
from actmat.checkpoints.base import Checkpoint, TensorSpec, torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.writing.shards import plan_shards
from actmat.checkpoints.writing.staging import Staging, check_output_path, disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.engine.resources import one_thread
from actmat.errors import AlignmentError, NumericalError, OutputError, RecipeError, memory_errors
from actmat.experts.base import Expert
from actmat.experts.resolve import open_base, open_expert
from actmat.extraction_plan import Target, extraction_targets
from actmat.linalg.svd import thin_svd
from actmat.system import usable_cores
from actmat.version import __version__

__all__ = ["RECORD_NAME", "ExtractReport", "ExtractSettings", "extract_adapter", "read_extraction"]

RECORD_NAME = "actmat_extract.json"
"""The record of an extraction, beside the adapter."""

DTYPES = ("float64", "float32", "bfloat16", "float16")

_SPOOL = "spool-{:05d}.bin"
_ONE_FILE = 1 << 62


@dataclass(frozen=True)
class ExtractSettings:
    """Wishes for an extraction.

    Args:
        rank: of every layer; or None.
        energy: share of the squared norm that every layer keeps, in (0, 1]; or None.
        others: `save` keeps changed tensors that LoRA cannot hold whole in the adapter; `leave` leaves them out.
        dtype: of the factors; default: the base's, tensor by tensor.
        threads: layers at the same time; default: all cores; does not change the result.
    """

    rank: int | None = None
    energy: float | None = None
    others: str = "save"
    dtype: str | None = None
    threads: int | None = None

    @property
    def workers(self) -> int:
        """Layers at the same time."""
        return self.threads or usable_cores()

    def check(self) -> None:
        """Refuse what no adapter can be extracted with.

        Raises:
            RecipeError: says what.
        """
        if (self.rank is None) == (self.energy is None):
            raise RecipeError("Say how much of each delta is kept: either a rank (--rank 64) or a share of its squared "
                              "norm (--energy 0.99).")  # fmt: skip
        if self.rank is not None and self.rank < 1:
            raise RecipeError(f"expected a positive rank, found {self.rank}")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise RecipeError(f"expected an energy above 0 and at most 1, found {self.energy}")
        if self.others not in ("save", "leave"):
            raise RecipeError(f"'others' is {self.others!r}; expected save or leave")
        if self.dtype not in (None, *DTYPES):
            raise RecipeError(f"'dtype' is {self.dtype!r}; expected one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class ExtractReport:
    """Result of an extraction.

    Args:
        out: folder of the adapter.
        record: contents of `actmat_extract.json`.
        was_finished: an earlier call with the same inputs made it; nothing was done.
    """

    out: Path
    record: Mapping[str, Any]
    was_finished: bool = False

    @property
    def relative_error(self) -> float:
        """`||D - B A||_F / ||D||_F` over all layers that are factored."""
        return float(self.record["relative_error"])


@memory_errors()
def extract_adapter(
    base: str,
    model: str,
    out: Path,
    settings: ExtractSettings,
    done: Callable[[str], None] = lambda name: None,
    about: Mapping[str, Any] | None = None,
) -> ExtractReport:
    """Write an adapter for PEFT; see the module. Interrupted, the same call goes on.

    Args:
        base: the checkpoint that the model was fine-tuned from.
        model: a fine-tuned checkpoint, or an adapter of any family.
        out: must not exist, or be empty.
        settings: what is wanted.
        done: called with the name of each tensor that is done.
        about: further fields of the record, in place of its own.

    Raises:
        MergeError: nothing is at `out`.
    """
    settings.check()
    began = time.perf_counter()
    with open_base(base) as opened, open_expert(model, opened) as expert:
        targets, notes, config = extraction_targets(opened, expert, save=settings.others == "save")
        fingerprint = _fingerprint(opened, expert, settings)
        if (finished := _finished(out, fingerprint)) is not None:
            return ExtractReport(out, finished, was_finished=True)
        if problems := check_output_path(out, overwrite=False, inputs={"base": Path(base), "model": Path(model)}):
            raise OutputError("The output cannot be written there.", problems)
        stage = Staging(out, fingerprint)
        try:
            journal = stage.open()
            rows = _extract_all(targets, opened, expert, settings, stage, dict(journal), done)
            if not any(r["kind"] != "left out" and r["tensors"] for r in rows):
                raise AlignmentError(f"{model} differs from {base} in no tensor that an adapter could hold.")
            record = _record(base, model, settings, fingerprint, rows, notes) | dict(about or {})
            record["seconds"] = time.perf_counter() - began
            _assemble(stage, rows, record, _config(config, rows, base))
            stage.commit()
        except BaseException as error:  # Ctrl-C too: decide what is kept, and pass it on
            if not stage.finished or isinstance(error, AlignmentError | NumericalError):  # these would recur
                stage.discard()
            raise
        finally:
            stage.close()
    return ExtractReport(out, record)


def read_extraction(out: Path) -> ExtractReport:
    """The report of an adapter that was extracted into `out`.

    Raises:
        CheckpointError: there is none.
    """
    return ExtractReport(out, read_object(out / RECORD_NAME))


def _fingerprint(base: Checkpoint, expert: Expert, settings: ExtractSettings) -> str:
    files = [[f.path, f.size, f.modified_ns, f.change_ns, f.etag] for c in (base, expert) for f in c.identity()]
    wanted = dataclasses.asdict(settings) | {"threads": 0}
    state = {"files": files, "settings": wanted, "versions": [__version__, torch.__version__]}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _finished(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """The record of an adapter that an earlier call made of the same inputs."""
    if not (out / RECORD_NAME).is_file():
        return None
    record = read_object(out / RECORD_NAME)
    return record if record.get("fingerprint") == fingerprint else None


def _extract_all(
    targets: Sequence[Target],
    base: Checkpoint,
    expert: Expert,
    settings: ExtractSettings,
    stage: Staging,
    journal: Mapping[str, Mapping[str, Any]],
    done: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Rows of the record, in the order of the targets; tensors of each are in a file of the stage."""

    def one(numbered: tuple[int, Target]) -> dict[str, Any]:
        number, target = numbered
        spool = stage.path / _SPOOL.format(number)
        known = journal.get(target.name)
        if known is not None and (not known["tensors"] or spool.is_file()):
            return dict(known)
        row, tensors = _extract(target, base, expert, settings)
        with disk_errors(stage.path):
            if tensors:
                spool.write_bytes(b"".join(bytes(raw_bytes(t.contiguous())) for t in tensors))
        row["spool"] = spool.name
        stage.record(row)
        done(target.name)
        return row

    with one_thread(), ThreadPoolExecutor(max(1, settings.workers)) as pool:
        return list(pool.map(one, enumerate(targets)))


@dataclass
class _Kept:
    """The triplets that are kept of a delta."""

    b_OR: Tensor
    a_RI: Tensor
    row: dict[str, Any] = field(default_factory=dict)


def _extract(
    target: Target, base: Checkpoint, expert: Expert, settings: ExtractSettings
) -> tuple[dict[str, Any], list[Tensor]]:
    """The record of one tensor, and what is stored of it."""
    row: dict[str, Any] = {"name": target.name, "module": target.module, "kind": target.kind, "reason": target.reason}
    delta, tuned = _delta(target, base, expert)
    norm = float(torch.linalg.norm(delta.double()))
    if not torch.isfinite(delta).all():
        raise NumericalError(f"tensor '{target.name}' of the model or of the base holds NaN or Inf")
    row |= {"norm": norm, "tensors": []}
    if target.kind == "left out" or norm == 0:
        reason = "the same as in the base" if norm == 0 else target.reason
        return row | {"kind": "unchanged" if norm == 0 else "left out", "reason": reason}, []
    dtype = settings.dtype or base.specs[target.name].dtype
    if target.kind == "saved":
        stored = tuned.to(torch_dtype(dtype))
        row["tensors"] = [_described(name, stored, dtype) for name in target.stored]
        return row | {"relative_error": 0.0}, [stored] * len(target.stored)
    kept = _kept(delta.mT if target.is_turned else delta, settings, torch_dtype(dtype))
    row |= kept.row
    row["tensors"] = [_described(n, t, dtype) for n, t in zip(target.stored, (kept.a_RI, kept.b_OR), strict=True)]
    return row, [kept.a_RI, kept.b_OR]


def _described(name: str, tensor: Tensor, dtype: str) -> dict[str, Any]:
    return {"name": name, "shape": list(tensor.shape), "dtype": dtype}


def _delta(target: Target, base: Checkpoint, expert: Expert) -> tuple[Tensor, Tensor]:
    """`D` in float32 (float64 for tensors of that dtype), and `W_0 + D`."""
    spec = base.specs[target.name]
    dtype = torch.float64 if spec.dtype == "float64" else torch.float32
    start = base.read(target.name).to(dtype)
    source = expert.source(target.source)
    if source.kind == "stored":
        tuned = expert.read(target.source)
        return tuned.to(dtype) - start, tuned
    delta = expert.delta(target.source, 0, spec.numel, dtype).view(spec.shape)
    return delta, start + delta


def _kept(delta_OI: Tensor, settings: ExtractSettings, dtype: torch.dtype) -> _Kept:
    """The best approximation, and its rank and error: that of the rounded factors."""
    svd = thin_svd(delta_OI.contiguous())
    squares = svd.s_K.square()
    if settings.rank is not None:
        rank = settings.rank
    else:
        assert settings.energy is not None, "one of the two is given"
        reached = squares.cumsum(0) >= settings.energy * float(squares.sum()) * (1 - 2.0**-40)
        rank = int(reached.int().argmax()) + 1 if bool(reached.any()) else len(squares)
    root_K = svd.s_K[:rank].sqrt()
    none = max(0, rank - len(root_K))  # zeros fill up: one rank for all layers is what loaders want
    b_OR = torch.nn.functional.pad(svd.u_OK[:, :rank] * root_K, (0, none)).to(dtype)
    a_RI = torch.nn.functional.pad((svd.v_IK[:, :rank] * root_K).mT, (0, 0, 0, none)).to(dtype).contiguous()
    total = delta_OI.double()
    norm = float(torch.linalg.norm(total))
    error = float(torch.linalg.norm(total.sub_(b_OR.double() @ a_RI.double())))
    return _Kept(b_OR, a_RI, {
        "rank": rank,
        "numerical_rank": int(svd.rank),
        "energy": float(squares[:rank].sum() / squares.sum()),
        "error_norm": error,
        "relative_error": error / norm,
    })  # fmt: skip


def _record(
    base: str,
    model: str,
    settings: ExtractSettings,
    fingerprint: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> dict[str, Any]:
    factored = [r for r in rows if "rank" in r]
    norm, error = (sum(r[key] ** 2 for r in factored) ** 0.5 for key in ("norm", "error_norm"))
    return {
        "actmat_extract": 1,
        "base": base,
        "model": model,
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k != "threads"},
        "versions": {"actmat": __version__, "torch": str(torch.__version__)},
        "fingerprint": fingerprint,
        "relative_error": error / norm if norm else 0.0,
        "notes": list(notes),
        "tensors": [{k: v for k, v in r.items() if k not in ("spool", "tensors")} for r in rows],
    }


def _config(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], base: str) -> dict[str, Any]:
    """`adapter_config.json`: the commonest rank, and the others by name; scaling 1 everywhere."""
    ranks = {r["module"]: r["rank"] for r in rows if "rank" in r}
    common = max(set(ranks.values()), key=lambda n: (list(ranks.values()).count(n), n)) if ranks else 1
    odd = {re.escape(m): n for m, n in ranks.items() if n != common}
    saved = sorted({r["module"] for r in rows if r["kind"] == "saved"})
    biased = any(r["kind"] == "saved" and r["module"] in ranks for r in rows)
    return {
        **config,
        "base_model_name_or_path": base,
        "r": common,
        "lora_alpha": common,
        "rank_pattern": odd,
        "alpha_pattern": dict(odd),
        "bias": "all" if biased else "none",
        "target_modules": sorted(ranks),
        "modules_to_save": [m for m in saved if m not in ranks] or None,
    }


def _assemble(
    stage: Staging, rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Join the spooled tensors to one file, and write the config and the record."""
    stored = [(r["spool"], [TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], "") for t in r["tensors"]])
              for r in rows if r["tensors"]]  # fmt: skip
    specs = [s for _, group in stored for s in group]
    shards = plan_shards(specs, _ONE_FILE, stem="adapter_model")
    writer = ShardWriter(stage.path, shards, durable=True)
    try:
        for spool, group in stored:
            data = memoryview((stage.path / spool).read_bytes())
            for spec, piece in zip(group, _pieces(data, group), strict=True):
                writer.sink(spec.name).write(piece)
        writer.finish(specs)
    finally:
        writer.close()
    with disk_errors(stage.path):
        for spool, _ in stored:
            (stage.path / spool).unlink()
        for name, data_out in (("adapter_config.json", config), (RECORD_NAME, record)):
            (stage.path / name).write_text(json.dumps(data_out, indent=2) + "\n", encoding="utf-8")


def _pieces(data: memoryview, group: Sequence[TensorSpec]) -> Iterator[memoryview]:
    position = 0
    for spec in group:
        yield data[position : position + spec.nbytes]
        position += spec.nbytes
