"""Can it be told by what experts do with prompts that these are of another task, or do not wake the expert?

    python -m benchmarks.awake adapters --base BASE --data FOLDER   # subjects and arguments of `benchmarks.few`

For four times eight inputs of each task: `reaction[j][i]`, the mean of `||h_j - h_0|| / ||h_0||` over the inputs of
task `i`, `h` the last hidden state of expert `j` and of the base; and, of language models, `alike[j][i]`: of how many
the answers of expert and base begin with the same token. Rows are appended to the result file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS
from benchmarks.few import Subject, append_row, open_subject, parse

FILE: Path = RESULTS / "awake.jsonl"
INPUTS, DRAWS = 8, 4


@torch.no_grad()
def react(subject: Subject, kind: str, draw: int) -> dict[str, Any]:
    """Reactions of every expert to inputs of every task."""
    reaction, alike = [], []
    chosen = slice(INPUTS * draw, INPUTS * (draw + 1))
    inputs = [subject.inputs(t, kind, 0, INPUTS * DRAWS)[chosen] for t in range(len(subject.tasks))]
    base = [subject.read(subject.base, some) for some in inputs]
    for expert in subject.experts:
        read = [subject.read(expert, some) for some in inputs]
        pairs = list(zip(read, base, strict=True))
        reaction.append([float(((h - h0).norm(dim=1) / h0.norm(dim=1)).mean()) for (h, _), (h0, _) in pairs])
        alike.append([sum(map(int.__eq__, first, first0)) for (_, first), (_, first0) in pairs])
    return {"reaction": reaction, "alike": alike if base[0][1] else None}


def main() -> None:
    """Measure all draws of one subject."""
    given = parse(__doc__, "awake")
    subject = open_subject(given)
    for kind in ("own", "reworded") if given.subject in ("adapters", "whole-texts") else ("own",):
        for draw in range(DRAWS):
            row = {"subject": given.subject, "kind": kind, "draw": draw, "tasks": list(subject.tasks)}
            append_row(FILE, row | react(subject, kind, draw))


if __name__ == "__main__":
    main()
