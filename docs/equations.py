"""Equations of the pages as MathML, which browsers show without a script.

In the pages they are indented blocks that a terminal and GitHub show as they are: `D* = sum_t w_t D_t^T`, `W^` for a
hat, `S~` for a tilde. Three spaces separate the equations of a line.
"""

from __future__ import annotations

import re
from html import escape

BLOCK = re.compile(r"(?<=\n\n) {4}\S.*\n(?: {4,}\S.*\n)*(?=\n)")
ATOM = re.compile(
    r"(?P<base>\s+|[A-Za-z]+|\d+|\|\||[<>!]=|\.\.+|.)"
    r"(?P<mark>(?<=\w)(?:\*|[~^](?=[_\s(),|]|$)))?"
    r"(?:_(?P<sub>\{[^{}]*\}|[A-Za-z]+|\d+))?(?:\^(?P<sup>\(\w\)|-?\d+|\+|[A-Za-z]+))?"
)
SYMBOLS = {"in": "∈", "o": "∘", "..": "…", "...": "…", "<=": "≤", ">=": "≥", "!=": "≠", "||": "‖", "-": "\u2212"}
LIMITS = {"sum": "∑", "prod": "∏", "argmin": "argmin"}
GREEK = ("beta", "gamma", "epsilon", "zeta", "eta", "kappa", "lambda", "phi")


def typeset(page: str) -> str:
    """The page with its equations as MathML."""
    return BLOCK.sub(lambda block: f'<div class="equations">{"".join(map(_line, block[0].splitlines()))}</div>\n', page)


def _line(text: str) -> str:
    cells = (f'<math displaystyle="true">{_row(cell)}</math>' for cell in re.split(r" {3,}", text.strip()))
    return f"<div>{''.join(cells)}</div>"


def _row(text: str) -> str:
    return "<mrow>" + "".join(_atom(atom) for atom in ATOM.finditer(text)) + "</mrow>"


def _atom(atom: re.Match[str]) -> str:
    """A name, number or sign with its accent, subscript and superscript."""
    base, mark, sub, sup = atom.group("base", "mark", "sub", "sup")
    if base.isspace():
        words = (
            re.search(r"[A-Za-z]{2}$", atom.string[: atom.start()]),
            re.match("[A-Za-z]{2}", atom.string[atom.end() :]),
        )
        return f'<mspace width="{0.3 if any(words) else 0.12}em"/>'
    shown = _sign(base)
    if mark in ("^", "~"):
        shown = f'<mover accent="true">{shown}<mo stretchy="false">{mark}</mo></mover>'
    above = "<mo>∗</mo>" if mark == "*" else sup and _row(sup)
    if not sub:
        return f"<msup>{shown}{above}</msup>" if above else shown
    below = _row(sub.strip("{}"))
    if above:
        return f"<msubsup>{shown}{below}{above}</msubsup>"
    tag = "munder" if base in LIMITS else "msub"
    return f"<{tag}>{shown}{below}</{tag}>"


def _sign(base: str) -> str:
    if base in LIMITS:
        return f'<mo movablelimits="false">{LIMITS[base]}</mo>'
    if base.isalnum() and base not in SYMBOLS:
        name = f"&{base};" if base in GREEK else base
        return f"<mn>{name}</mn>" if base.isdigit() else f"<mi>{name}</mi>"
    space = ' lspace="0" rspace="0"' if base in ("|", "||") else ""
    return f'<mo stretchy="false"{space}>{escape(SYMBOLS.get(base, base))}</mo>'
