"""What splitting wide products into panels changes in a merged delta, against float64 and against another source tree.

    python -m benchmarks.panels                                # the difference of this tree from float64
    python -m benchmarks.panels --save new.pt
    PYTHONPATH=OTHER/src python -m benchmarks.panels --save old.pt
    python -m benchmarks.panels --compare old.pt new.pt        # prints and writes both, and how far they are apart

Deltas have power-law spectra, as experts of language models do. Widths on both sides of 4096, from which the Gram
matrix has more than four column panels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.engine.resources import one_thread
from actmat.methods import get_method
from benchmarks.common import markdown, write_result

SHAPES = ((1600, 4608), (3072, 2048))
EXPERTS = 3
COLUMNS = ("shape", "error_before", "error_after", "difference", "same_bytes")


def deltas_of(rows: int, width: int) -> list[Tensor]:
    """Deltas whose columns decay as a power."""
    rng = torch.Generator().manual_seed(rows + width)
    decay = torch.arange(1, width + 1, dtype=torch.float32).pow(-0.5)
    mix = torch.randperm(width, generator=rng)
    return [1e-3 * (torch.randn(rows, width, generator=rng) * decay)[:, mix] for _ in range(EXPERTS)]


def merged(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The merge by `actmat_ridge`, whose solve takes the least time: the sums are those of all members."""
    method = get_method("actmat_ridge")
    with one_thread(), torch.no_grad():
        return method.merge([d.to(dtype) for d in deltas_of(*shape)], **method.resolve_options({})).value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="keep the merged deltas")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    given = parser.parse_args()
    if given.save:
        torch.save({str(s): merged(s, torch.float32) for s in SHAPES}, given.save)
        return
    here = {str(s): merged(s, torch.float32) for s in SHAPES}
    before, after = (torch.load(p) for p in given.compare) if given.compare else (here, here)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        exact = merged(shape, torch.float64)
        old, new = before[str(shape)].double(), after[str(shape)].double()
        rows.append(
            {
                "shape": f"{shape[0]} x {shape[1]}",
                "error_before": float((old - exact).norm() / exact.norm()),
                "error_after": float((new - exact).norm() / exact.norm()),
                "difference": float((new - old).norm() / exact.norm()),
                "same_bytes": str(bool(torch.equal(old, new))),
            }
        )
    print(markdown(rows, COLUMNS))
    print(write_result("panels", rows, experts=EXPERTS, columns=COLUMNS))


if __name__ == "__main__":
    main()
