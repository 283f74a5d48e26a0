"""base + adapter against `merge_and_unload` of several versions of PEFT.

    python -m benchmarks.semantics --environments /where/they/go | tee cells.txt
    python -m benchmarks.semantics --environments ... --only llama gpt2 --options plain use_dora --versions 0.18.1
    python -m benchmarks.semantics --environments ... --resume cells.txt     # takes over what a run has printed

Every family of `families.py` gets an adapter with every option of `options.py`, made, saved and merged by each version
of PEFT in float64. actmat merges the base and the adapter as they lie on the disk; the weights of both are compared by
name. With `--only`, `--options` or `--versions` nothing is written. The exit status is 1 after a failure.
`benchmarks.table` makes docs/semantics.md of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.common import write_result
from benchmarks.provenance import EVIDENCE, git
from benchmarks.semantics.compare import Cell, compare
from benchmarks.semantics.environments import VERSIONS, interpreter, versions_of
from benchmarks.semantics.options import OPTIONS, cases

Case = tuple[str, str]


def cells(python: str, chosen: Sequence[Case], log: Path | None = None) -> Iterator[tuple[Case, Cell]]:
    """The cells of one version; its process makes the next case while actmat merges and compares the last."""
    with tempfile.TemporaryDirectory() as temporary, (log or Path("/dev/null")).open("ab") as errors:
        folder = Path(temporary)
        command = [python, "-m", "benchmarks.semantics.worker", str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # PEFT prints sets
        worker = subprocess.Popen(command, cwd=EVIDENCE, env=environment, text=True, **pipes)
        assert worker.stdin is not None
        assert worker.stdout is not None

        def ask(number: int, *, file: bool = False) -> None:
            if number < len(chosen):
                print(json.dumps([*chosen[number], f"case{number}", file]), file=worker.stdin, flush=True)

        def answer() -> str | None:
            if not (line := worker.stdout.readline()):
                raise RuntimeError(f"the process of {python} ended")
            said: str | None = json.loads(line)
            return said

        ask(0)
        following = answer()
        for number, (family, option) in enumerate(chosen):
            said, made, case = following, OPTIONS[option], folder / f"case{number}"
            ask(number + 1)
            cell = Cell("peft", said) if said else compare(folder / family / made.dtype, case, made.bound)
            following = answer() if number + 1 < len(chosen) else None
            if cell.outcome == "FAILURE":
                ask(number, file=True)
                cell = loaded(cell, answer(), folder / family / made.dtype, case, made.bound)
            shutil.rmtree(case, ignore_errors=True)
            yield (family, option), cell
        worker.stdin.close()
        worker.wait()


def loaded(failure: Cell, said: str | None, base: Path, case: Path, bound: float) -> Cell:
    """The cell of a failure after PEFT has loaded the adapter from its file: its file may lack what it trained."""
    cell = Cell("FAILURE") if said else compare(base, case, bound)
    return replace(cell, outcome="file", why=failure.why) if cell.outcome == "exact" else failure


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, required=True, help="folder of the environments, made if missing")
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=list(VERSIONS))
    parser.add_argument("--only", nargs="+", help="families whose names begin so")
    parser.add_argument("--options", nargs="+", choices=OPTIONS)
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="output of earlier runs; later ones win")
    parser.add_argument("--log", type=Path, help="file for what PEFT prints")
    given = parser.parse_args()
    pythons = {v: interpreter(given.environments, v) for v in given.versions}
    facts = {v: versions_of(p) for v, p in pythons.items()}
    done = {key: cell for path in given.resume for key, cell in printed_cells(path)}
    for version, python in pythons.items():
        name = facts[version]["peft"]
        chosen = [
            case
            for case in cases()
            if (given.only is None or case[0].startswith(tuple(given.only)))
            and (given.options is None or case[1] in given.options)
            and (name, *case) not in done
        ]
        for case, cell in cells(python, chosen, given.log) if chosen else ():
            done[name, *case] = cell
            print(json.dumps([name, *case, asdict(cell)]), flush=True)
    print(*(f"# {n} {outcome}" for outcome, n in Counter(c.outcome for c in done.values()).items()), sep="\n")
    if given.only is None and given.options is None and given.versions == list(VERSIONS):
        write(done, list(facts.values()))
    sys.exit(any(c.outcome == "FAILURE" for c in done.values()))


def printed_cells(path: Path) -> Iterator[tuple[tuple[str, str, str], Cell]]:
    """The cells in the output of a run."""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            version, family, option, fields = json.loads(line)
            yield (version, family, option), Cell(**fields)


def write(done: dict[tuple[str, str, str], Cell], environments: list[dict[str, str]]) -> None:
    """The result file: a row per case, with its outcome by version, and the number of the reason where there is one."""
    reasons = sorted({c.why for c in done.values() if c.why})
    number = {why: n for n, why in enumerate(reasons)}
    rows = []
    for family, option in cases():
        row: dict[str, object] = {"family": family, "option": option}
        found = {v["peft"]: done[v["peft"], family, option] for v in environments}
        row |= {v: f"{c.outcome} {number[c.why]}" if c.why else c.outcome for v, c in found.items()}
        exact = [c for c in found.values() if c.outcome in ("exact", "file")]
        if exact:
            row |= {"error": float(f"{max(c.error for c in exact):.1e}"), "changed": max(c.changed for c in exact)}
        rows.append(row)
    write_result(
        "semantics", rows, commit=git("rev-parse", "--short", "HEAD"), environments=environments, reasons=reasons
    )


if __name__ == "__main__":
    main()
