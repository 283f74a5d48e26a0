"""Is the plan's estimate of peak memory true? Estimate against measured peak, for small and large Llamas.

    python -m benchmarks.memory
    python -m benchmarks.memory --sizes small few-large --methods actmat --name memory_actmat
    python -m benchmarks.memory --sizes few-large --methods model_stock karcher ties dare --experts 3 \
        --name memory_walks

The peak is of anonymous memory, sampled every 20 ms from outside. `ratio` is measured / estimated: above 1, the plan
promised too little.
"""

from __future__ import annotations

from typing import Any

from actmat import plan
from benchmarks.common import SOURCE, WORK, actmat_command, finish, fresh, measure, program
from benchmarks.make_llama import Size, home, make_family

SIZES = {
    "small": Size(hidden=1024, intermediate=2816, layers=18),
    "large": Size(),
    "few-large": Size(layers=3),  # the tensors of `large`, but fewer: the peak is a matter of tensors
}
SCOPES = {"actmat": "linear"} | dict.fromkeys(("average", "dare", "karcher", "model_stock", "ties"), "all")
COLUMNS = ("method", "parameters", "experts", "workers", "estimate_b", "peak_anonymous_b", "ratio", "wall_s")


def benchmark(method: str, size: Size, experts: int, workers: int) -> dict[str, Any]:
    """One merge, foretold and measured."""
    base, paths = make_family(home(WORK, size, "bfloat16"), size, experts, dtype="bfloat16")
    foretold = plan(base, paths, method=method, scope=SCOPES[method]).peak_bytes(workers)
    words = ["--base", base, *(w for p in paths for w in ("--expert", p)), "--method", method]
    words += ["--set", f"scope={SCOPES[method]}", "--threads", str(workers)]
    out = fresh(WORK / "out" / f"memory-{method}")
    run = measure([*actmat_command(), "merge", *words, "--out", out, "--quiet"], **SOURCE)
    return {
        "method": method,
        "parameters": f"{size.parameters() / 1e9:.3g} B",
        "experts": experts,
        "workers": workers,
        "estimate_b": foretold,
        "peak_anonymous_b": run.peak_anonymous_b,
        "ratio": run.peak_anonymous_b / foretold,
        "wall_s": run.wall_s,
    }


def main() -> None:
    parser = program(__doc__, "memory")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["small", "large"])
    parser.add_argument("--methods", nargs="+", choices=sorted(SCOPES), default=["average", "actmat"])
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--workers", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    given = parser.parse_args()
    rows = [
        benchmark(method, SIZES[size], given.experts, workers)
        for size in given.sizes
        for method in given.methods
        for workers in given.workers
    ]
    finish(given.name, rows, COLUMNS)


if __name__ == "__main__":
    main()
