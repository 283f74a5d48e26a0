"""What does a change cost? Merges by the working tree and by another revision, in turn.

    python -m benchmarks.against main
    python -m benchmarks.against main --size medium --repeats 9 --merges ties actmat

Each merge runs `--repeats` times by both source trees, in processes of their own, after a first round that is not
counted. The ratio is that of the pairs, with its 95 % interval: at most 5 % above 1 is `not dearer`. Whether a merged
byte changes is the question of `make ledger`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.adapters import write_adapters
from benchmarks.common import WORK, Run, aligned, alternate, fresh, measure, program, write_result
from benchmarks.make_llama import Size, home, make_family
from benchmarks.provenance import REPOSITORY, git

SIZES = {
    "small": Size(hidden=512, intermediate=1408, layers=10, heads=8, key_value_heads=4),
    "medium": Size(hidden=1024, intermediate=2816, layers=18),
}
MATRICES = Size(hidden=1024, intermediate=2816, layers=1, heads=16, vocabulary=1000)
ELEMENTWISE = {"average": 2, "task_arithmetic": 3, "ties": 3, "dare": 3, "model_stock": 3}
"""Methods that are measured on the whole model, and the number of their experts."""
MERGES = (*ELEMENTWISE, "actmat", "lora")
MEASURES = ("wall_s", "cpu_s", "peak_anonymous_b", "peak_resident_b")
COLUMNS = ("merge", "measure", "old", "new", "ratio", "low", "high", "judged")
BOUND = 1.05
"""Ratio up to which a change counts as free."""


@dataclass(frozen=True)
class Tree:
    """A source tree, of which `src` is used only.

    Args:
        name: `old` or `new`.
        root: folder that holds `src`.
        label: commit, for the record.
    """

    name: str
    root: Path
    label: str

    def environment(self) -> dict[str, str]:
        """Variables with which Python imports this tree's package, whatever is installed or lies in the folder."""
        return {"PYTHONPATH": str(self.root / "src"), "PYTHONSAFEPATH": "1"}

    def check(self) -> None:
        """Raise `RuntimeError` when a child would import the package from another place."""
        command = [sys.executable, "-c", "import actmat; print(actmat.__file__)"]
        place = subprocess.check_output(command, env=os.environ | self.environment(), cwd=self.root, text=True).strip()
        if not Path(place).is_relative_to(self.root / "src"):
            raise RuntimeError(f"the {self.name} tree is {self.root}, but Python imports {place}")


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[tuple[Tree, Tree]]:
    """The revision in a git worktree, which is removed at the end, and the working tree.

    Raises:
        SystemExit: git does not know the revision.
    """
    try:
        commit = git("rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"no revision '{revision}': {error.stderr.strip()}") from None
    changed = "+changes" if git("status", "--porcelain", "--", "src") else ""
    new = Tree("new", REPOSITORY, git("rev-parse", "--short=12", "HEAD") + changed)
    with tempfile.TemporaryDirectory() as folder:
        old = Tree("old", Path(folder).resolve() / "revision", commit)
        git("worktree", "add", "--quiet", "--detach", str(old.root), commit)
        try:
            for tree in (old, new):
                tree.check()
            yield old, new
        finally:
            git("worktree", "remove", "--force", str(old.root))


def merge_arguments(name: str, size: str) -> list[str | Path]:
    """Arguments of one of `MERGES`, `--out` left out; its inputs are made where they are missing."""
    if name == "lora":
        return [*_flags(write_adapters(WORK / "against-adapters", 4, 16, 1024, 2816, 8)), "-m", "actmat"]
    shape, experts, scope = (SIZES[size], ELEMENTWISE[name], "all") if name in ELEMENTWISE else (MATRICES, 2, "linear")
    base, paths = make_family(home(WORK, shape, "bfloat16"), shape, experts, dtype="bfloat16")
    return ["-b", base, *_flags(paths), "-m", name, "--set", f"scope={scope}"]


def _flags(experts: Sequence[Path]) -> list[str | Path]:
    return [flag for path in experts for flag in ("-e", path)]


def timed_pairs(trees: Sequence[Tree], name: str, arguments: Sequence[str | Path], rounds: int) -> list[dict[str, Any]]:
    """Rows of one merge, one for each of `MEASURES`: run by each tree in turn, after one round that is not counted."""

    def merge(tree: Tree) -> Run:
        written = ["--out", fresh(WORK / "out" / f"against-{tree.name}"), "--set", "durable=false", "--quiet"]
        return measure([sys.executable, "-m", "actmat", "merge", *arguments, *written], **tree.environment())

    for tree in trees:
        merge(tree)
    calls: dict[str, Callable[[], Run]] = {tree.name: lambda tree=tree: merge(tree) for tree in trees}
    runs = alternate(calls, rounds)
    return [
        {"merge": name, "measure": kind, **ratio_row(*([getattr(run, kind) for run in runs[t.name]] for t in trees))}
        for kind in MEASURES
    ]


def ratio_row(old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """Medians of both, the mean ratio new/old of the pairs with its interval, the judgment, and every value."""
    ratio, low, high = paired_ratio(old, new)
    return {
        "old": statistics.median(old),
        "new": statistics.median(new),
        "ratio": ratio,
        "low": low,
        "high": high,
        "judged": judgment(low, high),
        "all_old": [round(value, 4) for value in old],
        "all_new": [round(value, 4) for value in new],
    }


def paired_ratio(old: Sequence[float], new: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Geometric mean of new/old over the pairs, and its 95 % t interval (of the logarithms); None with one pair."""
    logs = [math.log(b / a) for a, b in zip(old, new, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), None, None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def judgment(low: float | None, high: float | None) -> str:
    """`dearer` where the whole interval lies above `BOUND`, `not dearer` where none of it does, else `unclear`."""
    if low is None or high is None:
        return "unclear"
    return "dearer" if low > BOUND else "not dearer" if high <= BOUND else "unclear"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed
    parser = program(__doc__, "against_speed", 5)
    parser.add_argument("revision", help="what to compare with: a commit, branch or tag")
    parser.add_argument("--merges", nargs="+", choices=MERGES, default=MERGES)
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="60 M or 0.26 B parameters")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with checked_out(given.revision) as trees:
        print(f"old: {trees[0].label}, new: {trees[1].label}\n")
        for name in given.merges:
            rows += timed_pairs(trees, name, merge_arguments(name, given.size), given.repeats)
    print("\n" + aligned([readable(row) for row in rows], COLUMNS))
    labels = {tree.name: tree.label for tree in trees}
    print(write_result(given.name, rows, columns=COLUMNS, **labels))


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """The row with medians in seconds or GiB, as the measure's name says, for a table."""
    kind = row["measure"][-2:]
    divisor, unit = (1 << 30, "GiB") if kind == "_b" else (1, "s")
    words = row["measure"].removesuffix(kind).replace("_", " ")
    return row | {"measure": f"{words}, {unit}", "old": row["old"] / divisor, "new": row["new"] / divisor}


if __name__ == "__main__":
    main()
