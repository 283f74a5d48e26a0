"""Put the scores of the suites, from the cache of their runs, into the repository.

    actmat experiment run text-minilm --data DATA --cache CACHE
    python -m benchmarks.evidence --cache CACHE        # then: python -m benchmarks.table
    python -m benchmarks.evidence --cache OTHER --fresh fresh  # what nothing was chosen on: files fresh-<suite>.jsonl

`results/evidence/<suite>.jsonl`, for suites at laptop size `results/small/<suite>.jsonl`, has one line per number:
suite, model, regime, row, task, seed, number right and of how many, and in `detail` the rule, its options, the scale,
the split, versions and the SHA-256 of the merged weights. `<suite>-gram.jsonl` has the cosines of `D^T D` with measured
Gram matrices, `<suite>-sizes.jsonl` the size of adapters. Lines that are there already stay, unless the cache has the
same number of the same training anew.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.sizes import size_file
from actmat_experiments.harness.suite import score_file
from actmat_experiments.pretrained.gram import gram_file
from benchmarks.common import own_command
from benchmarks.evidence.group import FOLDER, MORE, SUITES
from benchmarks.evidence.small import FOLDER as SMALL_FOLDER
from benchmarks.evidence.small import SMALL
from benchmarks.provenance import COLLECTED, record

NOTE = "Date, commit and machine are those of the collection from the cache; those of each run are in its lines."


def collect(cache: Path, folder: Path = FOLDER, small: Path = SMALL_FOLDER, *, fresh: str = "") -> list[Path]:
    """Add what the cache holds to the result files; the files that were written.

    Args:
        fresh: beginning of the names of files, where the runs choose nothing: see `group.FRESH` and `group.RANKS`.
    """
    if fresh:
        every = (*SUITES, *SMALL, "text-mpnet", "llm-qwen")
        written = [_scores(cache, suite, folder, f"{fresh}-") for suite in every]
        written += [_lines(size_file(cache, suite), folder, f"{fresh}-") for suite in every]
        written += [_lines(gram_file(cache, suite), folder, f"{fresh}-") for suite in every if fresh == "regimes"]
        return [path for path in written if path is not None]
    written = [_scores(cache, suite, folder) for suite in SUITES]
    written += [_scores(cache, suite, small) for suite in SMALL]
    written += [_lines(of(cache, suite), folder) for suite in SUITES for of in (gram_file, size_file)]
    return [path for path in written if path is not None]


def _scores(cache: Path, suite: str, folder: Path, prefix: str = "") -> Path | None:
    path = folder / f"{prefix}{suite}.jsonl"
    if not (new := read_scores(score_file(cache, suite))):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    scores = {s.identity: s for s in (*read_scores(path), *new)}
    path.write_text("".join(json.dumps(asdict(s), sort_keys=True) + "\n" for s in scores.values()), encoding="utf-8")
    return path


def _lines(found: Path, folder: Path, prefix: str = "") -> Path | None:
    path = folder / f"{prefix}{found.name}"
    if not found.is_file():
        return None
    before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    lines = {_measured(line): line for line in (*before, *found.read_text(encoding="utf-8").splitlines())}
    path.write_text("".join(f"{line}\n" for line in lines.values()), encoding="utf-8")
    return path


def _measured(line: str) -> tuple[str, ...]:
    """What a line measured: what was measured again, with other rounding, counts once."""
    row, names = json.loads(line), ("model", "regime", "seed", "settings", "samples", "task", "tensor")
    return tuple(str(row.get(name)) for name in names)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="of 'actmat experiment run'")
    parser.add_argument("--fresh", choices=list(MORE), default="", help="runs with files of their own")
    given = parser.parse_args()
    for path in collect(given.cache, fresh=given.fresh):
        suite = path.stem.removesuffix("-gram").removesuffix("-sizes").removeprefix(f"{given.fresh}-")
        record(
            path,
            f"actmat experiment run {suite} --data DATA --cache CACHE; {own_command()}",
            note=NOTE,
            commit_of=COLLECTED,
        )
        print(path)


if __name__ == "__main__":
    main()
