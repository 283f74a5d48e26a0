"""What a second thread brings, and that it changes no byte: the ACTMat merge of a reduced Llama.

    python -m benchmarks.threads
    python -m benchmarks.threads --threads 1 2 4 8 --layers 8

Runs with different numbers of threads alternate. The outputs must be the same bytes; a difference ends the benchmark
with an error.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from benchmarks.common import (
    HERE,
    WORK,
    Run,
    actmat_command,
    alternate,
    fresh,
    markdown,
    measure,
    summary,
    write_result,
)
from benchmarks.make_llama import add_size_arguments, home, make_family, size_from

COLUMNS = ("method", "threads", "wall_s", "speed_up", "efficiency", "peak_anonymous_b")


def weights_digest(folder: Path) -> str:
    """Hash of all weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="actmat")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="threads", help="name of the result file")
    add_size_arguments(parser)
    parser.set_defaults(hidden=1024, intermediate=2816, layers=4)
    given = parser.parse_args()
    size = size_from(given)
    base, experts = make_family(home(WORK, size, "bfloat16"), size, given.experts, dtype="bfloat16")
    outputs = {count: WORK / "out" / f"threads-{count}" for count in given.threads}

    def merge(count: int) -> Run:
        command: list[str | Path] = [*actmat_command(), "merge", "--base", base, "--method", given.method]
        for expert in experts:
            command += ["--expert", expert]
        command += ["--out", fresh(outputs[count]), "--threads", str(count), "--quiet"]
        return measure(command, None, PYTHONPATH=str(HERE.parent / "src"))

    found = alternate({str(count): lambda count=count: merge(count) for count in given.threads}, given.repeats)
    digests = {count: weights_digest(out) for count, out in outputs.items()}
    if len(set(digests.values())) > 1:
        raise SystemExit(f"the bytes depend on the number of threads: {digests}")
    rows: list[dict[str, Any]] = []
    for count in given.threads:
        row = {"method": given.method, "threads": count, **summary(found[str(count)])}
        row["speed_up"] = summary(found[str(given.threads[0])])["wall_s"] / row["wall_s"]
        row["efficiency"] = row["speed_up"] * given.threads[0] / count
        rows.append(row)
    print(markdown(rows, COLUMNS))
    print(write_result(given.name, rows, parameters=size.parameters(), experts=given.experts, columns=COLUMNS))


if __name__ == "__main__":
    main()
