"""Break formulae that carry a claim, one at a time in a copy of the repository, and see that their tests fail.

    python -m tests.mutants                # all of them, some minutes
    python -m tests.mutants interval rank  # those whose names begin so

A row of `MUTANTS` is one change of one file and the tests that must see it. The exit status is 1 if a mutant survives,
if its text is not in the file once, or if its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "packages", "benchmarks", "chaos", "docs", "fuzz", "tests")
EVIDENCE = "tests/house/test_benchmark_evidence.py"
CHOICE = "tests/house/test_benchmark_choice.py"


@dataclass(frozen=True)
class Mutant:
    """A change of one file, and the tests that must fail by it; a module of `src` among them runs its examples."""

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant("interval: sources", "benchmarks/evidence/intervals.py", '"rest": -1.0}', '"rest": 1.0}', (EVIDENCE,)),
    Mutant(
        "interval: bound", "benchmarks/evidence/intervals.py", "chosen = max(known", "chosen = min(known", (EVIDENCE,)
    ),
    Mutant("interval: width", "benchmarks/evidence/intervals.py", "t.ppf(0.975", "t.ppf(0.95", (EVIDENCE,)),
    Mutant("interval: freedom", "benchmarks/evidence/intervals.py", "total**2 / spread", "total / spread", (EVIDENCE,)),
    Mutant("choice: limit", "benchmarks/evidence/choice.py", "TOLERATED = -1.0", "TOLERATED = -100.0", (CHOICE,)),
    Mutant("choice: complete", "benchmarks/evidence/choice.py", "if len(some) == sets}", "if some}", (CHOICE,)),
    Mutant("claim: verdict", "benchmarks/evidence/claims.py", "abs(gap + near) > half", "half > 0", (CHOICE,)),
    Mutant(
        *("cut-off: default", "src/actmat/linalg/interference/rule.py", "width * FLOAT32_EPS if", "FLOAT32_EPS if"),
        ("tests/linalg/interference/test_filters.py",),
    ),
    Mutant(
        *(
            "cut-off: rounding",
            "src/actmat/linalg/interference/rule.py",
            "return max(wanted, min(",
            "return max(wanted, 0 * min(",
        ),
        ("tests/linalg/interference/test_filters.py",),
    ),
    Mutant(
        *(
            "cut-off: scale",
            "src/actmat/linalg/interference/rule.py",
            "cutoff = rtol * float(values_N[-1])",
            "cutoff = rtol",
        ),
        ("tests/linalg/interference/test_filters.py",),
    ),
    Mutant(
        *(
            "cut-off: proof",
            "src/actmat/linalg/interference/spectral_solve.py",
            "bound = rtol * 1.001",
            "bound = rtol * 0.5",
        ),
        ("tests/linalg/interference/test_cholesky.py",),
    ),
    Mutant(
        *("rank: of an expert", "src/actmat/linalg/singular.py", "min(shape[-2:]) // n_experts", "min(shape[-2:])"),
        ("tests/methods/test_tsv.py",),
    ),
    Mutant(
        "rank: of a matrix",
        "src/actmat/linalg/svd.py",
        "RANK_RTOL = 2.0**-20",
        "RANK_RTOL = 2.0**-30",
        ("tests/linalg/test_svd.py",),
    ),
    Mutant(
        "rank: participation",
        "src/actmat/linalg/interference/rule.py",
        "participation * (1 - 1e-9)",
        "participation * (1 + 1e-9)",
        ("tests/linalg/interference/test_filters.py",),
    ),
    Mutant(
        "rank: of LoRA",
        "src/actmat/experts/lora/config.py",
        "(math.sqrt(rank) if",
        "(rank if",
        ("tests/adapters/test_adapter_reading.py",),
    ),
    Mutant(
        "cost: spectrum",
        "src/actmat/linalg/operations.py",
        '"eigh", 9 * size',
        '"eigh", 4 * size',
        ("tests/plan/test_flops.py",),
    ),
    Mutant(
        "cost: rate",
        "src/actmat/planning/cost.py",
        "NOMINAL_BYTES = 5e10, 5e8",
        "NOMINAL_BYTES = 5e10, 5e9",
        ("src/actmat/planning/cost.py",),
    ),
    Mutant(
        "cost: items",
        "src/actmat/planning/cost.py",
        "ITEM_BYTES, SOURCE_BYTES = 6_000, 1_000",
        "ITEM_BYTES, SOURCE_BYTES = 60, 10",
        ("tests/plan/test_memory_numbers.py",),
    ),
    Mutant(
        "score: divergence",
        "src/actmat/extras/tune/evaluate.py",
        "(expert.log_p_PK - log_q_PK)",
        "(log_q_PK - expert.log_p_PK)",
        ("src/actmat/extras/tune/evaluate.py",),
    ),
)


def copied(folder: Path) -> None:
    """What the tests need of the repository; caches and environments stay behind."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "work", "build"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)


def passes(folder: Path, tests: tuple[str, ...]) -> bool:
    """True if these tests pass in the copy."""
    examples = ["--doctest-modules"] if any(t.startswith("src/") for t in tests) else []
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--no-header", *examples, *tests]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.returncode == 0


def main() -> int:
    """Command line."""
    chosen = [m for m in MUTANTS if m.name.startswith(tuple(sys.argv[1:]) or "")]
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copied(folder)
        if not passes(folder, tuple(dict.fromkeys(t for m in chosen for t in m.tests))):
            wrong.append("tests fail without a mutant")
        for mutant in chosen:
            path = folder / mutant.file
            before = path.read_text(encoding="utf-8")
            if before.count(mutant.text) != 1:
                wrong.append(f"{mutant.name}: {mutant.text!r} is {before.count(mutant.text)} times in {mutant.file}")
                continue
            path.write_text(before.replace(mutant.text, mutant.instead), encoding="utf-8")
            died = not passes(folder, mutant.tests)
            path.write_text(before, encoding="utf-8")
            print(f"{'died' if died else 'SURVIVED':9}{mutant.name}", flush=True)
            wrong += [] if died else [f"{mutant.name}: no test of {', '.join(mutant.tests)} fails"]
    print("\n".join(wrong) or f"all {len(chosen)} mutants died")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
