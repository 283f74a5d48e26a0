"""Inner products of a few long vectors: blocks of float32 added up in float64, against float64 and float32 alone.

    python -m benchmarks.products
    python -m benchmarks.products --entries 1048576 --apart 0.01

Tensors are one random vector plus `apart` times others, so that their cosine is `1 / (1 + apart^2)`. The error is the
largest of all cosines', against float64. Rows of one tensor are multiplied where they lie, as a merge reads them;
tensors apart are copied first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.linalg.chunks import Stacked
from actmat.linalg.inner import PRODUCT, Products
from benchmarks.common import markdown, once, timed, torch_threads, write_result

COLUMNS = ("tensors", "apart", "how", "ns_per_entry", "times_float64", "cosine_error")


def cosines(gram_TT: Tensor) -> Tensor:
    """Of a Gram matrix, in float64."""
    norm_T = gram_TT.double().diagonal().sqrt()
    return gram_TT.double() / torch.outer(norm_T, norm_T)


def in_spans(rows_TN: Tensor, *, stacked: bool) -> Tensor:
    """What a merge does, span by span; `stacked`: each span is one matrix."""
    products = Products(rows_TN.shape[1:], rows_TN.dtype)
    total = torch.zeros(len(rows_TN), len(rows_TN), dtype=torch.float64)
    for span_TS in rows_TN.split(PRODUCT, dim=1):
        total += products.of(Stacked(span_TS) if stacked else list(span_TS))
    return total


def rows_of(count: int, entries: int, apart: float, repeats: int) -> list[dict[str, Any]]:
    """One row per way of forming the products."""
    generator = torch.Generator().manual_seed(count)
    shared_1N = torch.randn(1, entries, generator=generator)
    rows_TN = shared_1N + apart * torch.randn(count, entries, generator=generator)
    wide_TN = rows_TN.double()
    exact_TT = cosines(wide_TN @ wide_TN.mT)
    ways: dict[str, Callable[[], Tensor]] = {
        "float64, span by span": lambda: sum(
            (s.double() @ s.double().mT for s in rows_TN.split(PRODUCT, 1)), torch.zeros(())
        ),
        "blocks, rows of one tensor": lambda: in_spans(rows_TN, stacked=True),
        "blocks, tensors apart": lambda: in_spans(rows_TN, stacked=False),
        "float32, one product": lambda: rows_TN @ rows_TN.mT,
    }
    found: list[dict[str, Any]] = []
    for how, work in ways.items():
        seconds = timed(work, repeats)
        row = {"tensors": count, "apart": apart, "how": how, "ns_per_entry": seconds / entries * 1e9}
        row["cosine_error"] = float((cosines(work()) - exact_TT).abs().max())
        found.append(row)
    for row in found:
        row["times_float64"] = row["ns_per_entry"] / found[0]["ns_per_entry"]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", nargs="+", type=int, default=[2, 3, 8])
    parser.add_argument("--apart", nargs="+", type=float, default=[1.0, 3e-4])
    parser.add_argument("--entries", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--name", default="products", help="name of the result file")
    given = parser.parse_args(arguments)
    with torch_threads(1):
        once(lambda: torch.rand(1 << 24).sum())  # clocks up
        rows = [r for t in given.tensors for a in given.apart for r in rows_of(t, given.entries, a, given.repeats)]
    print(markdown(rows, COLUMNS))
    print(write_result(given.name, rows, entries=given.entries, columns=COLUMNS))


if __name__ == "__main__":
    main()
