"""Fill the tables of a Markdown page from the result files.

    python -m benchmarks.table             # writes benchmarks/README.md anew
    python -m benchmarks.table --check     # exit status 1 when it is not what the result files say
    python -m benchmarks.table docs/performance.md

A table stands between `<!-- table: NAME -->` and `<!-- end table -->`; NAME is a file of `results/`. Nothing outside
these marks is touched; a table without a result file says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.common import HERE, RESULTS, markdown

PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def table(name: str, results: Path = RESULTS) -> str:
    """The table of one result file, under a line that says how and where it was made."""
    path = results / f"{name}.json"
    if not path.exists():
        return f"*Not measured yet: there is no `results/{name}.json`.*\n"
    result = json.loads(path.read_text())
    columns = result.get("columns") or list(result["rows"][0])
    made = f"`{result['command']}`, {result['processor']}, {result['cores']} cores, torch {result['torch']}"
    return f"{made}, {result['date']}.\n\n{markdown(result['rows'], columns)}\n"


def filled(page: str, results: Path = RESULTS) -> str:
    """The page with every table made anew."""
    return PLACE.sub(lambda m: f"{m[1]}{table(m['name'], results)}{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=[HERE / "README.md"])
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    stale = False
    for page in given.pages:
        before = page.read_text()
        after = filled(before)
        stale = stale or before != after
        if before != after and not given.check:
            page.write_text(after)
        print(f"{page}: {'up to date' if before == after else 'stale' if given.check else 'written'}")
    sys.exit(1 if given.check and stale else 0)


if __name__ == "__main__":
    main()
