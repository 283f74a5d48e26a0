"""One layer of a Llama of 7B or 70B by the leading methods: time over its products, memory, and the host's result.

A row per method and shape: `layer_s` of all matrices of that shape in a layer, `products` the time of `D^T D` and
`D (D^T D)` of every expert by the same library, `difference` from the same call on the host, relative in the Frobenius
norm. The host computes beside the device, smallest shapes first; shapes that it does not reach have no difference.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

import actmat
from benchmarks.common import relative_error
from benchmarks.gpu.rows import arguments, clear_peak, give, peak_bytes, seconds_of, torch_device

EXPERTS = 3
METHODS = ("actmat_ridge", "actmat", "ct_merging", "tsv", "dc_merge")
SHAPES = {
    "7b": {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1},
    "70b": {(1024, 8192): 2, (8192, 8192): 2, (28672, 8192): 2, (8192, 28672): 1},
}
"""Model -> shape of its matrices (O x I) -> how many there are in a layer."""
ON_HOST = 8192 * 1024 + 1
"""Entries up to which every method is compared; above, up to twice as many, the ridge alone."""


def make_deltas(shape: tuple[int, int], device: torch.device) -> list[Tensor]:
    """Full rank, singular values falling like those of a noise matrix, 1e-3 per entry."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, device=device) * 1e-3 for _ in range(EXPERTS)]


def products(deltas: list[Tensor]) -> None:
    """What no rule of this family does without."""
    for delta_OI in deltas:
        delta_OI @ (delta_OI.mT @ delta_OI)


def measured(method: str, deltas: list[Tensor], there: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Seconds, memory and result of one matrix."""
    kept: list[Tensor] = []

    def work() -> None:
        kept[:] = [actmat.merge_matrices(method, deltas)]

    clear_peak(there)
    seconds = seconds_of(work, there, 1)
    row = {"matrix_s": seconds, "peak_b": peak_bytes(there), "deltas_b": sum(d.nbytes for d in deltas)}
    return row, kept[0].cpu()


def main() -> None:
    """Print a row per method and shape, and the difference of each when the host has merged it."""
    given = arguments(model=SHAPES)
    there = torch_device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    product_s: dict[tuple[int, int], float] = {}
    waiting: list[tuple[dict[str, Any], Tensor, Future[Tensor]]] = []
    with ThreadPoolExecutor(1) as host:
        for method, (full, count) in itertools.product(METHODS, SHAPES[given.model].items()):
            shape = (full[0] // 64, full[1] // 64) if given.quick else full
            deltas, name = make_deltas(shape, there), {"shape": f"{shape[0]}x{shape[1]}", "method": method}
            if shape not in product_s:
                product_s[shape] = seconds_of(partial(products, deltas), there)
            limit = (2 if method == "actmat_ridge" else 1) * ON_HOST
            compared = shape[0] * shape[1] <= limit
            answer = host.submit(actmat.merge_matrices, method, [d.cpu() for d in deltas]) if compared else None
            row, value = measured(method, deltas, there)
            row |= {"products_s": product_s[shape], "times_products": row["matrix_s"] / product_s[shape]}
            give(model=given.model, **name, experts=EXPERTS, **row, per_layer=count)
            if answer is not None:
                waiting.append((name, value, answer))
        for name, value, answer in waiting:
            give(model=given.model, **name, difference=relative_error(value, answer.result()))


if __name__ == "__main__":
    main()
