"""Does a change alter a merged byte, and what does it cost? The working tree against another revision.

    python -m benchmarks.against HEAD~1
    python -m benchmarks.against main --only bytes --expected lora-dare
    python -m benchmarks.against main --only speed --size medium --rounds 9

Both source trees run the same commands in processes of their own. *Bytes*: small models and adapters, one merge of
every kind. Weight files must be the same; `--expected` names merges that may differ. Differences of plans, manifests
and other files are listed and do not count. *Speed*: the same merges by each tree in turn; the ratio is that of the
pairs, with its 95 % interval. `not dearer` is an interval at most 5 % above 1.

The exit status is 1 when weights differ that are not expected to, or a merge fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, aligned, write_result
from benchmarks.comparison.inputs import make_inputs
from benchmarks.comparison.merges import INPUTS, MERGES, Merge
from benchmarks.comparison.outputs import compare_files, compare_texts, compare_weights
from benchmarks.comparison.timings import COLUMNS, commands, readable, timed_pairs
from benchmarks.comparison.trees import Server, Tree, checked_out

BYTE_COLUMNS = ("merge", "files", "tensors", "entries", "difference", "verdict")
PASSES = frozenset({"same", "expected"})


def compare_bytes(
    trees: Sequence[Tree], merges: Sequence[Merge], folder: Path, expected: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Run the merges by both trees at once, below `folder`; a row for each merge."""
    _make_inputs(trees[0], merges, folder / "inputs")
    with ThreadPoolExecutor(len(trees)) as pool:
        statuses = list(pool.map(lambda tree: _run_all(tree, merges, folder / tree.name), trees))
    return [row(merge, folder, [s[merge.name] for s in statuses], merge.name in expected) for merge in merges]


def _make_inputs(tree: Tree, merges: Sequence[Merge], inputs: Path) -> None:
    """Models, adapters, recipes, and statistics if a merge reads any, as `tree` collects them."""
    make_inputs(inputs)
    for merge in merges:
        if merge.recipe:
            merge.recipe_file(inputs).write_text(merge.recipe)
    wanted = {flag for merge in merges for flag in merge.arguments if f"{INPUTS / 'statistics'}" in flag}
    collecting = []
    for name in sorted(flag.partition("=")[0] for flag in wanted):
        command = [sys.executable, "-m", "actmat", "statistics", "collect", f"llama/{name}", "--fisher", "--quiet"]
        command += ["--data", f"{name}.jsonl", "--out", f"statistics/{name}"]
        collecting.append(subprocess.Popen(command, cwd=inputs, env=os.environ | tree.environment()))
    statuses = [process.wait() for process in collecting]
    if any(statuses):
        raise SystemExit("statistics could not be collected")


def _run_all(tree: Tree, merges: Sequence[Merge], folder: Path) -> dict[str, tuple[int, int]]:
    """Exit statuses of plan and merge for each merge; outputs lie in `folder`, named after it."""
    folder.mkdir(parents=True)
    found = {}
    with Server(tree, folder) as server:
        for merge in merges:
            plan = server.run(["plan", *merge.inputs(), "--json", "--full"], folder / f"{merge.name}.plan.json")
            out = ["--out", f"out/{merge.name}", "--set", "durable=false", "--quiet"]
            arguments = ["merge", *merge.inputs(), *merge.running, *out]
            found[merge.name] = (plan, server.run(arguments, folder / f"{merge.name}.log"))
    return found


def row(merge: Merge, folder: Path, statuses: Sequence[tuple[int, int]], expected: bool) -> dict[str, Any]:
    """Row of the table of bytes: the outputs of one merge below `folder`, `old` and `new`."""
    old, new = (folder / side / "out" / merge.name for side in ("old", "new"))
    weights = compare_weights(old, new)
    verdict = weights.verdict()
    if verdict not in PASSES and expected:
        verdict = "expected"
    notes = [*weights.problems, *compare_files(old, new)]
    texts = [(folder / side / f"{merge.name}.plan.json").read_text() for side in ("old", "new")]
    if words := compare_texts(texts[0], texts[1], (str(folder / "old"), str(folder / "new"))):
        notes.append(f"plan: {words}")
    for side, status in zip(("old", "new"), statuses, strict=True):
        if any(status):
            verdict = "failed"
            last = (folder / side / f"{merge.name}.log").read_text().strip()[-500:]
            notes.append(f"{side}: exit status {status[0]} of plan, {status[1]} of merge: {last}")
    return {
        "merge": merge.name,
        "files": f"{weights.same_files}/{weights.files}",
        "tensors": f"{weights.same_tensors}/{weights.tensors}",
        "entries": weights.entries,
        "difference": weights.difference,
        "verdict": verdict,
        "notes": notes,
    }


def _speed(trees: Sequence[Tree], names: Sequence[str], size: str, rounds: int) -> list[dict[str, Any]]:
    known = commands(size)
    rows = []
    for name in names:
        print(name)
        rows += timed_pairs(trees, name, known[name](), rounds)
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what to compare with: a commit, branch or tag")
    parser.add_argument("--only", choices=("bytes", "speed"), help="one part of the comparison")
    parser.add_argument("--merges", metavar="NAME[,NAME]", help="of bytes or speed, by name (default: all)")
    parser.add_argument("--expected", metavar="NAME[,NAME]", default="", help="merges whose weights may differ")
    parser.add_argument("--size", choices=("small", "medium"), default="small", help="60 M or 0.26 B parameters")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs of each merge")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="default: results/against.json, of speed alone against_speed.json"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep inputs and outputs of `bytes` in this folder")
    return parser


def chosen(parser: argparse.ArgumentParser, text: str | None, known: Sequence[str]) -> list[str]:
    """The names in a list separated by commas, all of them for None."""
    if text is None:
        return list(known)
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no merge called {', '.join(unknown)}; there are: {', '.join(known)}")
    return names


@contextlib.contextmanager
def _workspace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed
    arguments = parser()
    given = arguments.parse_args()
    parts = [given.only] if given.only else ["bytes", "speed"]
    known = {"bytes": [merge.name for merge in MERGES], "speed": list(commands(given.size))}
    names = set(chosen(arguments, given.merges, [name for part in parts for name in known[part]]))
    expected = frozenset(chosen(arguments, given.expected, known["bytes"]))
    compared: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    with _workspace(given.keep) as folder, checked_out(given.revision, folder) as trees:
        print(f"old: {trees[0].label}, new: {trees[1].label}\n")
        if "bytes" in parts:
            started = time.perf_counter()
            compared = compare_bytes(trees, [merge for merge in MERGES if merge.name in names], folder, expected)
            notes = [f"{row['merge']}: {note}" for row in compared for note in row["notes"]]
            print(aligned(compared, BYTE_COLUMNS), *notes, sep="\n")
            print(f"\n{len(compared)} merges in {time.perf_counter() - started:.0f} s\n")
        if "speed" in parts:
            timed = _speed(trees, [name for name in known["speed"] if name in names], given.size, given.rounds)
            print("\n" + aligned([readable(row) for row in timed], COLUMNS))
        more = {"old": trees[0].label, "new": trees[1].label, "bytes": compared}
    rows, columns = (timed, COLUMNS) if timed else (compared, BYTE_COLUMNS)
    name = "against_speed" if given.only == "speed" else "against"  # neither half wipes the record of the other
    print(write_result("against", rows, given.results or RESULTS / f"{name}.json", **more, columns=columns))
    sys.exit(any(row["verdict"] not in PASSES for row in compared))


if __name__ == "__main__":
    main()
