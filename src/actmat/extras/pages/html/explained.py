"""Explanations of the checks, embedded in the page for readers who have no documentation at hand.

`checks.json` holds the sections of docs/checks.md, without links; `python -m docs.generate` writes it.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files

from actmat.extras.pages.html.elements import Child, Markup, el

__all__ = ["FILE", "explanation", "next_step", "spelled"]

FILE = "checks.json"

_NEXT = {
    "AM101": "Merge experts that were saved in float32, or keep them as adapters: these deltas are mostly rounding.",
    "AM102": "Look for the fine-tuned weights: what was given as this expert is the base in another dtype.",
    "AM103": "Ask how this expert was saved: its delta looks compressed.",
    "AM104": "Merge the weights from before the quantisation.",
    "AM201": "Leave out the expert that equals the base, or give the right path.",
    "AM202": "Leave out one of the two equal experts, or give the right path.",
    "AM203": "Find the base that this expert was trained from; a merge across bases cannot work.",
    "AM204": "Try the checkpoint after the shared training stage as the base.",
    "AM301": "Normalise the experts: `-m wudi`, or `-o normalise=norm`.",
    "AM302": "Normalise the experts, lower `rtol`, or take `-m actmat_ridge`.",
    "AM401": "Try `--scale 0.3` to `0.5`, a cap (in a recipe, `postprocess: {norm_cap: average}`), or `-m average`.",
    "AM402": "Try a lower `--scale`, a cap (in a recipe, `postprocess: {norm_cap: average}`), or `-m actmat_bounded`.",
    "AM403": "Look at rank and cut-off of the tensors below; try `--compute-dtype float64`, or another scale.",
    "AM501": "Look at new tokens; `--keep '*embed*'` leaves the table as it is in the base.",
    "AM502": "Merge both tables by one rule, or tie them in config.json.",
}  # fmt: skip


@cache
def _sections() -> dict[str, str]:
    found: dict[str, str] = json.loads(files("actmat.extras.pages.html").joinpath(FILE).read_text(encoding="utf-8"))
    return found


def explanation(code: str) -> Markup | None:
    """The meaning of a check, as a paragraph; None for a code that this version does not know."""
    text = _sections().get(code)
    return None if text is None else el("p", *spelled(text))


def next_step(code: str) -> list[Child] | None:
    """The step to try after a finding, in a sentence; None where nothing has to be done."""
    text = _NEXT.get(code)
    return None if text is None else spelled(text)


def spelled(text: str) -> list[Child]:
    """Words, with what stands between backticks as code and between double stars as strong."""
    pieces = re.split(r"`([^`]*)`|\*\*([^*]*)\*\*", text)
    out: list[Child] = []
    for n in range(0, len(pieces), 3):
        code, strong = (*pieces[n + 1 : n + 3], None, None)[:2]
        out.append(pieces[n])
        out += [el("code", code)] if code is not None else [el("strong", strong)] if strong is not None else []
    return out
