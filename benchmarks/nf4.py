"""Does `--base-as nf4` round as bitsandbytes does, on the CPU?

    pip install bitsandbytes==0.50.2
    python -m benchmarks.nf4

Random matrices, normal and with heavy tails, in bfloat16: quantised and decoded by bitsandbytes' functions, and rounded
by `rounded_nf4`. `different` counts the entries whose bits differ, `largest` is the largest difference over the entry.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from actmat.extras.quantised.nf4 import rounded_nf4
from benchmarks.common import markdown, write_result

SHAPES = ((96, 200), (256, 512), (512, 1536))
COLUMNS = ("scheme", "values", "shape", "entries", "different", "largest")


def by_bitsandbytes(values: Tensor, *, nested: bool) -> Tensor:
    """Quantised and decoded by the library that is asked about."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=nested)
    return torch.as_tensor(functional.dequantize_4bit(codes, state, blocksize=64, quant_type="nf4"))


def matrices() -> dict[str, Tensor]:
    """Name -> values, one of each kind and shape."""
    rng, found = torch.Generator().manual_seed(0), {}
    for shape in SHAPES:
        normal = torch.randn(shape, generator=rng)
        found[f"normal {shape[0]} x {shape[1]}"] = normal
        found[f"heavy {shape[0]} x {shape[1]}"] = normal * torch.exp(torch.randn(shape, generator=rng))
    return {name: (0.02 * values).bfloat16() for name, values in found.items()}


def row(name: str, values: Tensor, *, nested: bool) -> dict[str, Any]:
    """Both sides of one matrix."""
    ours, theirs = rounded_nf4(values, nested=nested), by_bitsandbytes(values, nested=nested)
    apart = (ours.double() - theirs.double()).abs() / theirs.double().abs().clamp_min(torch.finfo(torch.float64).tiny)
    kind, _, shape = name.partition(" ")
    return {
        "scheme": "nf4-double" if nested else "nf4",
        "values": kind,
        "shape": shape,
        "entries": values.numel(),
        "different": int((ours != theirs).sum()),
        "largest": float(apart.where(theirs != 0, 0.0).max()),
    }


def main() -> None:
    """Command line."""
    rows = [row(name, values, nested=nested) for nested in (False, True) for name, values in matrices().items()]
    print(markdown(rows, COLUMNS))
    print(write_result("nf4", rows, bitsandbytes=version("bitsandbytes")))


if __name__ == "__main__":
    main()
