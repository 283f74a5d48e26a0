"""The suite `llm-qwen` on one GPU within a time limit: a process for each seed and way of training.

    python -m benchmarks.qwen --base FOLDER --data TEXTS --out OUT --limit-seconds 540
    python -m benchmarks.qwen --base FOLDER --data TEXTS --out OUT --prepare     # only the base, ahead of time

The processes share the GPU, a cache and the host's cores: while one trains or tests, others merge. OUT/llm-qwen.jsonl
grows row by row, those of most interest first. At the limit the processes are ended; the same command goes on from its
cache. `--seeds` and `--losses` name the sets that are run, for another machine to measure what is missing. OUT keeps
the logs, too. Fit for a GPU with 80 GB; with `--device cpu` it takes days.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.sizes import size_file
from actmat_experiments.harness.suite import score_file
from actmat_experiments.pretrained.qwen.suite import make_base

SUITE = "llm-qwen"
_POLL_S = 2.0
_GRACE_S = 5.0
"""Seconds between the end of a process and its kill."""


def start(given: argparse.Namespace, seed: str, loss: str, threads: int) -> subprocess.Popen[bytes]:
    """The process of one set of experts; its output goes to OUT/output.log."""
    settings = [f"losses={loss}", f"base={given.base}", *given.set]
    command = [
        *(sys.executable, "-m", "actmat", "experiment", "run", SUITE, "--seeds", seed, "--device", given.device),
        *("--data", given.data, "--cache", given.cache, "--threads", threads),
        *(["--tasks", given.tasks] if given.tasks else []),
        *itertools.chain.from_iterable(("--set", setting) for setting in settings),
    ]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with (given.out / "output.log").open("ab") as log:
        return subprocess.Popen([str(c) for c in command], stdout=log, stderr=subprocess.STDOUT, env=variables)


def collect(given: argparse.Namespace) -> int:
    """Copy scores, sizes and logs of the cache into OUT; the number of scores."""
    scores = score_file(given.cache, SUITE)
    for path in (scores, size_file(given.cache, SUITE), *(given.cache / "logs").glob("*.log")):
        if path.is_file():
            shutil.copyfile(path, given.out / path.name)
    return len(read_scores(scores))


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(given: argparse.Namespace) -> list[int | None]:
    """Run all sets until they are done or the time is over; the exit status of each, None for one that was ended."""
    began, sets = time.monotonic(), list(itertools.product(given.seeds.split(","), given.losses.split(",")))
    threads = max(1, (os.cpu_count() or 1) // len(sets))
    processes = [start(given, seed, loss, threads) for seed, loss in sets]
    shown = 0
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() - began < given.limit_seconds:
            time.sleep(_POLL_S)
            if (n := collect(given)) != shown:
                shown = n
                print(f"[{time.monotonic() - began:6.1f} s] {n} scores", flush=True)
    finally:
        statuses = [process.poll() for process in processes]
        end(processes)
        collect(given)
    return statuses


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of the base, see the suite")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--out", type=Path, required=True, help="for scores and logs")
    parser.add_argument("--cache", type=Path, default=Path("experiment-cache"), help="for all stages")
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="end after so many seconds")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--losses", default="answers,whole", help="ways of training")
    parser.add_argument("--tasks", default="", help="some tasks only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], help="name=value of the suite's settings")
    parser.add_argument("--prepare", action="store_true", help="make the base in the cache, and nothing else")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    return given


def main() -> None:
    """Command line: 0 if all sets are complete, 1 if one failed or was ended."""
    given = arguments()
    if given.prepare:
        print(make_base(Cache(given.cache), str(given.base)).path)
        return
    statuses = run(given)
    print(f"exit statuses, None if ended at the limit: {statuses}; {collect(given)} scores in {given.out}")
    sys.exit(int(any(statuses) or None in statuses))


if __name__ == "__main__":
    main()
