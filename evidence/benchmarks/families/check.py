"""One architecture: build, perturb, merge, reload, run; and its packed maps against the splits of its code."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import actmat
from actmat.checkpoints.base import TensorSpec
from actmat.layout.resolve import resolve_layout
from benchmarks.common import stored_tensors
from benchmarks.families.inputs import batch_of
from benchmarks.families.splits import observed_pieces
from benchmarks.families.tiny import Architecture, build, parameters_of

SMALL = 0.05
"""Size of the perturbation, relative to the spread of a tensor."""


def check(one: Architecture) -> dict[str, Any]:
    """What was found of one architecture; `stage` is how far it came, `why` the error that stopped it."""
    row: dict[str, Any] = {"library": one.library, "class": one.name, "type": one.model_type, "stage": "none"}
    warnings.simplefilter("ignore")
    try:
        model = build(one)
    except Exception as error:  # noqa: BLE001 - any class may refuse a config that was shrunk by rule
        return row | {"why": _first_line(error)}
    row |= {"stage": "built", "parameters": parameters_of(model)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            model.save_pretrained(folder / "base")
            plain = type(model).from_pretrained(folder / "base").eval()
        except Exception as error:  # noqa: BLE001
            return row | {"why": "not saved and loaded by its own library: " + _first_line(error)}
        return row | _merged(plain, folder)


def _merged(model: Any, folder: Path) -> dict[str, Any]:
    """Merge two perturbed copies, load the result and run it."""
    batch, run_error = batch_of(model)
    before = None if batch is None else _outputs(model, batch)
    for seed in (1, 2):
        _perturbed(type(model).from_pretrained(folder / "base"), seed).save_pretrained(folder / f"expert{seed}")
    experts = [folder / "expert1", folder / "expert2"]
    try:
        report = actmat.merge(folder / "base", experts, out=folder / "out", threads=1, durable=False)
    except actmat.MergeError as error:
        return {"stage": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    row: dict[str, Any] = {"stage": "merged", "family": report.plan.family, "tensors": len(report.plan.items)}
    row["actions"] = dict(sorted(Counter(i.action for i in report.plan.items).items()))
    row["unknown"] = sorted({i.name for i in report.plan.items if "of unknown use" in i.reason})[:5]
    try:
        merged, info = type(model).from_pretrained(folder / "out", output_loading_info=True)
        keys = {k: sorted(map(str, info.get(k) or ())) for k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    except Exception as error:  # noqa: BLE001
        return row | {"why": "the merge does not load: " + _first_line(error)}
    if any(keys.values()):
        return row | {"why": "keys: " + json.dumps({k: v[:3] for k, v in keys.items() if v})}
    row["stage"] = "loaded"
    if batch is None:
        return row | {"why": "not run: " + run_error} | _packed(model, folder, None)
    after = _outputs(merged.eval(), batch)
    if not all(torch.isfinite(t).all() for t in after):
        return row | {"why": "the merge gives values that are not finite"}
    assert before is not None
    changed = any(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(before, after, strict=False))
    row["stage"] = "ran"
    row["changed"] = changed
    return row | _packed(model, folder, lambda: model(**batch))


def _perturbed(model: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                size = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
                parameter.add_((noise * (SMALL * size + 0.01)).to(parameter.dtype))
    return model


def _outputs(model: Any, batch: Mapping[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(**batch)
    if hasattr(out, "values"):  # losses, routers, attention of segments: on request
        found = [value for name, value in out.items() if not re.search("loss|router|segmentation|auxiliary", name)]
    else:
        found = [out] if isinstance(out, Tensor) else list(out)
    return [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]


def _packed(model: nn.Module, folder: Path, run: Callable[[], object] | None) -> dict[str, Any]:
    """Stored 2-D tensors whose maps are packed, by the layout and by the code."""
    stored = stored_tensors(folder / "base")
    specs = {n: TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), "") for n, t in stored.items()}
    config = json.loads((folder / "base" / "config.json").read_text())
    layouts = resolve_layout(specs, config).tensors
    packed = {n for n, layout in layouts.items() if layout.blocks and len(specs[n].shape) == 2}
    if run is None:
        return {"packed": len(packed)}
    pieces = observed_pieces(model, run)
    parameters = dict(model.named_parameters())
    agree, missed, wrong, seen = 0, [], [], set()
    for label, parts in pieces.items():
        value = parameters[label].detach()
        name = next((n for n, t in stored.items() if t.shape == value.shape and torch.equal(t, value)), None)
        if name is None:
            continue
        seen.add(name)
        rows = specs[name].shape[0 if layouts[name].orientation == "OI" else 1]
        mine = [set(map(int, m[:, 0])) for m in layouts[name].to_matrices(_numbers(specs[name].shape, layouts[name]))]
        theirs = [set(p) for p in parts] + ([rest] if (rest := set(range(rows)).difference(*parts)) else [])
        if len(mine) == 1:
            missed.append(f"{name}: {_described(theirs)}")
        elif all(any(m <= t for t in theirs) for m in mine):  # equal, or finer where the code splits again later
            agree += 1
        else:
            wrong.append(f"{name}: {_described(theirs)} in the code, {_described(mine)} here")
    return {
        "packed": len(packed),
        "agree": agree,
        "unseen": len(packed - seen),
        "missed": sorted(missed)[:6],
        "wrong": sorted(wrong)[:6],
    }


def _numbers(shape: tuple[int, ...], layout: Any) -> Tensor:
    """A tensor of this shape whose entries are the numbers of its output rows."""
    if layout.orientation == "OI":
        return torch.arange(shape[0])[:, None].expand(shape)
    return torch.arange(shape[1])[None, :].expand(shape)


def _described(parts: list[set[int]]) -> str:
    return ", ".join(
        f"{len(p)} rows from {min(p)}" + ("" if max(p) - min(p) + 1 == len(p) else " (apart)") for p in parts
    )


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:160]
