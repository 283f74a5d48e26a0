"""Break formulae that carry a claim, one at a time in a copy of the repository, and see that their tests fail.

    python -m tests.mutants                # all of them, some minutes
    python -m tests.mutants interval rank  # those whose names begin so

A row of `MUTANTS` is one change of one file, which has the text once, and the tests that must see it. The exit status
is 1 if a mutant survives, or if its tests fail without it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "packages", "evidence", "chaos", "docs", "fuzz", "tests")
INTERVALS, CHOICE = (f"evidence/benchmarks/evidence/{n}.py" for n in ("intervals", "choice"))
RULE, COST = "src/actmat/linalg/interference/rule.py", "src/actmat/planning/cost.py"
SOLVE, SHARE = (f"src/actmat/linalg/{n}.py" for n in ("interference/spectral_solve", "singular"))
SVD, LOWRANK = (f"src/actmat/linalg/{n}.py" for n in ("svd", "lowrank"))
MOMENTS, SPACE = "src/actmat/linalg/interference/moments.py", "src/actmat/extras/tune/space.py"
LORA, SCORE = "src/actmat/experts/lora/config.py", "src/actmat/extras/tune/evaluate.py"
EVIDENCE, CHOSEN = (f"evidence/tests/benchmarks/test_{n}.py" for n in ("evidence", "choice"))
FILTERS, CHOLESKY = (f"tests/linalg/interference/test_{n}.py" for n in ("filters", "cholesky"))
REGMEAN = "tests/methods/test_regmean.py"

KEPT, BY_INPUTS, WHOLE = *(f"src/actmat/extras/tune/{n}.py" for n in ("kept", "with_inputs")), "tests/tune/test_kept.py"

LOOK, AUTO, AUTOMATIC = "src/actmat/run/adapters.py", "src/actmat/run/automatic.py", "tests/e2e/test_automatic.py"

Mutant = tuple[str, str, str, str, str]
"""Name; file; text in it; what stands in its place; tests that must fail (a module of `src`: its examples)."""
MUTANTS: tuple[Mutant, ...] = (
    ("interval: sources", INTERVALS, '"rest": -1.0}', '"rest": 1.0}', EVIDENCE),
    ("interval: bound", INTERVALS, "chosen = max(known", "chosen = min(known", EVIDENCE),
    ("interval: width", INTERVALS, "t.ppf(0.975", "t.ppf(0.95", EVIDENCE),
    ("interval: freedom", INTERVALS, "total**2 / spread", "total / spread", EVIDENCE),
    ("choice: limit", CHOICE, "TOLERATED = -1.0", "TOLERATED = -100.0", CHOSEN),
    ("choice: complete", CHOICE, "set.intersection(set(CANDIDATES), *", "set(CANDIDATES) & set.union(*", CHOSEN),
    ("choice: held out", CHOICE, "for s in every if s.base != without and _bel", "for s in every if _bel", CHOSEN),
    ("choice: base", CHOICE, "own[seed] - max(average, base)", "own[seed] - average", CHOSEN),
    ("choice: held border", CHOICE, "is not None and s.base != without]", "is not None]", CHOSEN),
    ("choice: level", CHOICE, "LEVEL = 0.5", "LEVEL = 50.0", CHOSEN),
    ("cut-off: default", RULE, "width * FLOAT32_EPS if", "FLOAT32_EPS if", FILTERS),
    ("cut-off: rounding", RULE, "return max(wanted, min(", "return max(wanted, 0 * min(", FILTERS),
    ("cut-off: scale", RULE, "cutoff = rtol * float(values_N[-1])", "cutoff = rtol", FILTERS),
    ("cut-off: proof", SOLVE, "bound = rtol * 1.001", "bound = rtol * 0.5", CHOLESKY),
    ("rank: of an expert", SHARE, "min(shape[-2:]) // n_experts", "min(shape[-2:])", "tests/methods/test_tsv.py"),
    ("rank: of a matrix", SVD, "RANK_RTOL = 2.0**-20", "RANK_RTOL = 2.0**-30", "tests/linalg/test_svd.py"),
    ("bases: condition", LOWRANK, "** 2 <= WELL_CONDITIONED", "** 2 >= 0", "tests/linalg/test_lowrank.py"),
    ("rank: directions found", SVD, "on_1K = (s_K > 0)", "on_1K = (s_K >= 0)", "tests/linalg/test_svd.py"),
    ("rank: participation", RULE, "participation * (1 - 1e-9)", "participation * (1 + 1e-9)", FILTERS),
    ("rank: of LoRA", LORA, "(math.sqrt(rank) if", "(rank if", "tests/adapters/test_adapter_to_model.py"),
    ("ridge: unit", SOLVE, "spectral.ridge * mean, rows", "spectral.ridge, rows", REGMEAN),
    ("ridge: filter", RULE, "ridge = spectral.ridge * mean", "ridge = spectral.ridge", FILTERS),
    ("prior: inputs", SPACE, "PRIOR / max(1, measured)", "PRIOR * measured", SPACE),
    ("prior: trace", MOMENTS, "alpha=prior * float(", "alpha=prior or float(", REGMEAN),
    ("cost: rate", COST, "NOMINAL_BYTES = 5e10, 5e8", "NOMINAL_BYTES = 5e10, 5e9", "tests/plan/test_plan_json.py"),
    ("cost: items", COST, "SOURCE_BYTES = 6_000, 1_000", "SOURCE_BYTES = 60, 10", "tests/plan/test_memory_numbers.py"),
    ("size: mean", LOOK, "(mean(sizes) if", "(median(sizes) if", AUTOMATIC),
    ("overlap: pairs", LOOK, "in pairwise(cores) for", "in list(pairwise(cores))[:1] for", AUTOMATIC),
    ("start: no base", AUTO, 'return "other" if apart else "unknown"', 'return "unknown"', AUTOMATIC),
    ("modules: of all", LOOK, "frozenset(e.modules) for", "len(e.modules) > 0 for", AUTOMATIC),
    ("score: divergence", SCORE, "(expert.log_p_PK - log_q_PK)", "(log_q_PK - expert.log_p_PK)", SCORE),
    ("kept: whole", KEPT, "[not differing for differing in", "[differing < 2 for differing in", WHOLE),
    ("right: whole", KEPT, "[right == n for right, n in", "[right > 0 for right, n in", WHOLE),
    ("kept: inputs", BY_INPUTS, "(sum(sum(c[label].kept) for", "(sum(max(c[label].kept) for", WHOLE),
    ("prior: fewest", BY_INPUTS, "fewest = min((sum(", "fewest = max((sum(", WHOLE),
)


def copied(folder: Path) -> None:
    """What the tests need of the repository; caches and environments stay behind."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "work", "build"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)


def passes(folder: Path, tests: list[str]) -> bool:
    """True if these tests pass in the copy."""
    examples = ["--doctest-modules"] if any(t.startswith("src/") for t in tests) else []
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *examples, *tests]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.returncode == 0


def main() -> int:
    """Command line."""
    chosen = [m for m in MUTANTS if m[0].startswith(tuple(sys.argv[1:]) or "")]
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copied(folder)
        if not passes(folder, list(dict.fromkeys(m[-1] for m in chosen))):
            wrong.append("tests fail without a mutant")
        for name, file, text, instead, tests in chosen:
            path = folder / file
            before = path.read_text(encoding="utf-8")
            path.write_text(before.replace(text, instead), encoding="utf-8")
            outcome = "SURVIVED" if passes(folder, [tests]) else "died"
            path.write_text(before, encoding="utf-8")
            print(f"{name:20} {outcome}", flush=True)
            wrong += [] if outcome == "died" else [f"{name}: {text!r} in {file} {outcome}; tests: {tests}"]
    print("\n".join(wrong) or f"all {len(chosen)} mutants died")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
