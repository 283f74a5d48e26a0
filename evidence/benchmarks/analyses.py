"""Tables of the analyses whose numbers the pages show.

actmat demo --out DEMO
python -m benchmarks.analyses --demo DEMO
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from actmat_experiments.analyses import drift, theorem1, theorem2
from actmat_experiments.analyses.demo import demo_cosine
from actmat_experiments.analyses.demo_bounds import demo_transfer
from actmat_experiments.analyses.result import Analysis
from benchmarks.common import finish, program


def rows_of(table: Table) -> list[dict[str, str]]:
    """Cells of a table of the terminal, by the titles of its columns."""
    titles = [str(column.header).strip().replace("|", r"\|") for column in table.columns]
    columns = [
        [Text.from_markup(str(cell)).plain.strip().replace("|", r"\|") for cell in column.cells]
        for column in table.columns
    ]
    return [dict(zip(titles, cells, strict=True)) for cells in zip(*columns, strict=True)]


def main() -> None:
    """Run them all."""
    parser = program(__doc__, "analysis")
    parser.add_argument("--demo", type=Path, required=True, help="output of 'actmat demo'")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bound = partial(theorem2, method="actmat")
    runs: Mapping[str, Callable[[], Analysis]] = {
        "theorem1": theorem1,
        "theorem2": partial(bound, n_tasks=3, activation="relu"),
        "theorem2-tanh": partial(bound, n_tasks=6, activation="tanh"),
        "drift": partial(drift, given.demo, task="digit"),
        "cosine": partial(demo_cosine, given.demo),
        "transfer": partial(demo_transfer, given.demo, method="actmat"),
    }
    for name, run in runs.items():
        tables = run().tables()
        rows = rows_of(tables[-1 if name.startswith("theorem2") else 0])
        finish(f"{given.name}-{name}", rows, list(rows[0]), command="python -m benchmarks.analyses --demo DEMO")


if __name__ == "__main__":
    main()
