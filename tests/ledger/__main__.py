"""Run the same small merges in this checkout and in another one, and compare every byte that they write.

    python -m tests.ledger ../other                    # all cases, some minutes
    python -m tests.ledger ../other --only 'space/*'   # those whose names match

Both checkouts run by the interpreter and the packages of this environment, on the same inputs, which are made once.
Compared are the hash of every tensor (dtype, shape and bytes), the metadata and order of every weight file, every other
file except texts (manifest, card, report), exit codes, and, as a second list, numbers and hashes of the manifest's
records. A case must end with its expected exit code in both. The exit status is 1 if anything but records differs.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ledger.answers import RECORD
from tests.ledger.cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 6
"""Differences of one case that are printed."""
Answers = Mapping[str, Mapping[str, Any]]
"""Case -> its exit code, text and leaves."""


def environment(checkout: Path, work: Path) -> dict[str, str]:
    """Variables of a process that imports actmat from a checkout, its plug-ins as that checkout declares them."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = work / "installed" / f"actmat-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: actmat\nVersion: {project['version']}\n")
    groups = {f"[{group}]\n": entries for group, entries in project["entry-points"].items()}
    lines = [head + "".join(f"{n} = {place}\n" for n, place in entries.items()) for head, entries in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    paths = (metadata.parent, checkout / "src", ROOT)
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HOME": str(work / "hub"), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "TERM": "dumb"}


def make_inputs(cases: Sequence[Case], work: Path) -> Path:
    """Folder with the inputs of these cases, and their recipes."""
    inputs = work / "inputs"
    inputs.mkdir()
    groups = sorted({group for case in cases for group in case.groups})
    command = [sys.executable, "-m", "tests.ledger.inputs", str(inputs), *groups]
    made = subprocess.run(command, env=environment(ROOT, work), capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"the inputs cannot be made: {made.stderr[-4000:]}")
    for case in cases:
        if isinstance(case.run, Mapping):
            (inputs / f"{case.slug}.json").write_text(json.dumps(case.run))
    return inputs


def ask(checkouts: Sequence[Path], cases: Sequence[Case], work: Path, jobs: int) -> list[Answers]:
    """Answers of every checkout, which run at the same time, each in so many processes."""
    inputs, running = make_inputs(cases, work), []
    for number, checkout in enumerate(checkouts):
        side = work / str(number)
        for job in range(jobs):
            (out := side / str(job)).mkdir(parents=True)
            names = [c.name for c in cases[job::jobs]]
            command = [sys.executable, "-m", "tests.ledger.answers", str(checkout), str(inputs), str(out), *names]
            with (out / "log.txt").open("w") as log:
                process = subprocess.Popen(command, env=environment(checkout, out), stdout=log, stderr=log)
            running.append((number, out, process))
    answers: list[dict[str, Any]] = [{} for _ in checkouts]
    for number, out, process in running:
        if process.wait():
            print(f"{checkouts[number]}: exit {process.returncode}\n{(out / 'log.txt').read_text()[-2000:]}")
            raise SystemExit(1)
        lines = (out / "answers.jsonl").read_text().splitlines()
        answers[number] |= {answer["case"]: answer for answer in map(json.loads, lines)}
    return list(answers)


def compare(case: Case, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Differences of an answer from that of the other checkout: of bytes, and of records."""
    if wrong := [a for a in (ours, theirs) if a["code"] != case.code]:
        side = "this checkout" if wrong[0] is ours else "the other one"
        return [f"exit {wrong[0]['code']} of {side}, expected {case.code}: {wrong[0]['text']}"], []
    differences: tuple[list[str], list[str]] = [], []
    mine, other = ours["leaves"], theirs["leaves"]
    if case.code == 0 and not mine:
        differences[0].append("nothing is written")
    for name in dict.fromkeys([*mine, *other]):
        if mine.get(name) != other.get(name):
            found, expected = (str(leaves.get(name, "absent"))[:24] for leaves in (mine, other))
            differences[name.startswith(RECORD)].append(f"{name}: {found}, in the other checkout {expected}")
    return differences


def report(cases: Sequence[Case], ours: Answers, theirs: Answers) -> int:
    """Print what differs; the exit status."""
    count = {"hashes": 0, "records": 0}
    results = [(case, compare(case, ours[case.name], theirs[case.name])) for case in cases]
    for kind, name in enumerate(count):
        for case, differences in results:
            if lines := differences[kind]:
                count[name] += 1
                more = [f"... {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
                print(f"{name} differ: {case.name}", *lines[:MOST_LINES], *more, sep="\n  ")
    hashes = f"hashes differ in {count['hashes']}" if count["hashes"] else "no hash differs"
    records = f", records differ in {count['records']}" if count["records"] else ""
    print(f"{len(cases)} cases, {hashes}{records}")
    return int(count["hashes"] > 0)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.ledger", description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--only", default="*", help="pattern of names of cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes for each of the two checkouts")
    wanted = parser.parse_args()
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, wanted.only)]
    if not cases:
        parser.error(f"no case matches '{wanted.only}': names are such as {', '.join(c.name for c in CASES[::60])}")
    with tempfile.TemporaryDirectory() as temporary:
        ours, theirs = ask([ROOT, wanted.other.resolve()], cases, Path(temporary), wanted.jobs)
    return report(cases, ours, theirs)


if __name__ == "__main__":
    sys.exit(main())
