"""One case: base + adapter merged by actmat, tensor by tensor against what PEFT merged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

import actmat
from benchmarks.common import relative_error, stored_tensors


@dataclass(frozen=True)
class Cell:
    """What came of one case.

    Args:
        outcome: `exact`, `file` (exact to what PEFT loads from the file, which lacks what was trained), `refused` (by
            actmat), `peft` (PEFT refuses), or `FAILURE`.
        why: the reason, of all but exact ones.
        error: largest relative Frobenius error of a tensor.
        changed: number of tensors that the adapter changes.
    """

    outcome: str
    why: str = ""
    error: float = 0.0
    changed: int = 0


def compare(base: Path, case: Path, bound: float) -> Cell:
    """Merge the adapter of a case into the base, and compare."""
    try:
        actmat.merge(
            *(base, [case / "adapter"]), out=case / "out", method="linear", compute_dtype="float64", durable=False,
            threads=1, overwrite=True,
        )  # fmt: skip
    except actmat.MergeError as error:
        return Cell("refused", reason(error, case, base))
    before, expected, found = (stored_tensors(p) for p in (base, case / "merged", case / "out"))
    memory = torch.load(case / "merged" / "memory.pt")
    for name in found.keys() - expected.keys():  # PEFT may have tied it, or the model shares its layers
        inside = next((n for n in memory if f".{name}".endswith(f".{n}")), None)
        expected |= {} if inside is None else {name: memory[inside]}
    if missing := sorted(expected.keys() ^ found.keys()):
        return Cell("FAILURE", f"tensors of one side only: {', '.join(missing)}"[:300])
    changed = [n for n, t in expected.items() if n not in before or not torch.equal(t, before[n])]
    if not changed:
        return Cell("FAILURE", "the adapter changes nothing")
    errors = {n: relative_error(found[n], t) for n, t in expected.items()}
    worst = max(errors, key=lambda n: errors[n])
    if not errors[worst] <= bound:
        wrong = sorted(n for n, e in errors.items() if not e <= bound)
        return Cell("FAILURE", f"{len(wrong)} tensors differ, by {errors[worst]:.2g} '{worst}'", errors[worst])
    return Cell("exact", error=errors[worst], changed=len(changed))


def reason(error: Exception, case: Path, base: Path) -> str:
    """The first problem that an error names, without the places of this machine; the first line without one."""
    problems = getattr(error, "problems", None) or [str(error).splitlines()[0]]
    text = str(problems[0]).replace(f"{case / 'adapter'}: the adapter cannot be merged into {base}. ", "")
    for place, word in ((case / "adapter", "ADAPTER"), (base, "BASE"), (case, "CASE")):
        text = text.replace(str(place), word)
    return re.sub(r"\s+", " ", text).removeprefix("ADAPTER: ")
