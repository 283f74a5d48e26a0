"""Put the scores of the suites on pretrained models, from the cache of their runs, into the repository.

    actmat experiment run text-minilm --data DATA --cache CACHE
    python -m benchmarks.evidence --cache CACHE        # then: python -m docs.generate

`results/evidence/<suite>.jsonl` has one line per number: suite, model, regime, row, task, seed, number right and of how
many, and in `detail` the rule, its options, the scale, the split, versions and the SHA-256 of the merged weights.
`<suite>-gram.jsonl` has the cosines of `D^T D` with measured Gram matrices. Lines that are there already stay, unless
the cache has the same number anew.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from actmat_experiments.harness.results import Score, read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.pretrained.gram import gram_file
from benchmarks.evidence.group import FOLDER, SUITES

__all__ = ["collect"]


def collect(cache: Path, folder: Path = FOLDER) -> list[Path]:
    """Add what the cache holds to the result files; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suite in SUITES:
        path = folder / f"{suite}.jsonl"
        scores = {s.identity: s for s in (*read_scores(path), *read_scores(score_file(cache, suite)))}
        if scores:
            path.write_text("".join(_line(s) for s in scores.values()), encoding="utf-8")
            written.append(path)
        found = gram_file(cache, suite)
        if found.is_file():
            place = folder / f"{suite}-gram.jsonl"
            before = place.read_text(encoding="utf-8").splitlines() if place.is_file() else []
            lines = dict.fromkeys((*before, *found.read_text(encoding="utf-8").splitlines()))
            place.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            written.append(place)
    return written


def _line(score: Score) -> str:
    return json.dumps(asdict(score), sort_keys=True) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="of 'actmat experiment run'")
    print(*collect(parser.parse_args().cache), sep="\n")


if __name__ == "__main__":
    main()
