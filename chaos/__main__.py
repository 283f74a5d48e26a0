"""`python -m chaos --runs N`: disturb merges at random, give the same command again, compare the bytes.

Every run forks processes in which all is imported. Run k of a seed is the same fault every time, except for kills at a
moment of the clock and for rivals. With `--record FILE` the runs are counted in a file, and go on where they stopped.
The exit code is 1 if any run ended with other bytes, a half-finished output, a leftover, or an exit code that is not
documented.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.results import read_record, write_record
from chaos.runs import KINDS, Chaos
from chaos.sorts import SORTS

IMPORTS = (
    "datasets",
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
    "transformers.models.auto.tokenization_auto",
    "actmat.cli.tune",
    "actmat.extras.tune.tuning",
)
"""All that a search imports besides."""


def kth(k: int, sorts: Sequence[str]) -> tuple[str, str]:
    """Sort of output and kind of fault of run `k`: all pairs, before any comes again."""
    turn, sort = divmod(k, len(sorts))
    return sorts[sort], KINDS[(turn + sort) % len(KINDS)]


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sort", action="append", choices=sorted(SORTS), help="may be repeated; default: all")
    parser.add_argument("--record", type=Path, metavar="FILE", help="count the runs there, and go on where it stops")
    args = parser.parse_args()
    import torch

    sorts = args.sort or list(SORTS)
    for module in IMPORTS if "tune" in sorts else ():
        importlib.import_module(module)
    torch.set_num_threads(1)
    record = read_record(args.record, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder) / "chaos", sorts)
        while record.runs < args.runs:
            k, began = record.runs, time.monotonic()
            sort, kind = kth(k, sorts)
            disturbances, found = chaos.run(sort, kind, random.Random(f"{record.seed} {k}"))
            record.add(sort, kind, disturbances, [f"run {k}: {p}" for p in found], time.monotonic() - began)
            if args.record:
                write_record(args.record, record)
    kinds: Counter[str] = Counter()
    for counts in record.by.values():
        kinds.update(counts)
    print("\n".join([*record.problems, f"{record.runs} runs, {len(record.problems)} problems; {dict(kinds)}"]))
    return 1 if record.problems else 0


if __name__ == "__main__":
    sys.exit(main())
