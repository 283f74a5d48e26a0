"""`python -m fuzz --minutes N [--door NAME]`: cases per door, and every failure; exit code 1 if there is one."""

from __future__ import annotations

import argparse
import sys
import time

import fuzz.doors  # noqa: F401 - registers the doors
from fuzz.harness import DOORS, run_door


def main() -> int:
    """Share the time among the doors, with new seeds until it is over."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--door", action="append", choices=sorted(DOORS), help="may be repeated; default: all")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    names = arguments.door or sorted(DOORS)
    failed = False
    for name in names:
        deadline = time.monotonic() + 60 * arguments.minutes / len(names)
        found = run_door(name, cases=10**9, deadline=deadline, seed=arguments.seed)
        print(f"{name:16} {found.cases:8} cases, slowest {found.slowest:.2f} s", flush=True)
        if found.failure:
            print(f"FAILED: {found.failure}", flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
