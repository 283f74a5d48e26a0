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
    return BLOCK.sub(lambda block: _lines(block[0]), page)


def _lines(block: str) -> str:
    rows = (re.split(r" {3,}", line.strip()) for line in block.splitlines())
    cells = ("".join(f'<math displaystyle="true">{_row(cell)}</math>' for cell in row) for row in rows)
    return '<div class="equations">' + "".join(f"<div>{row}</div>" for row in cells) + "</div>\n"


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
    above, shown = base in LIMITS, _sign(base)
    if mark in ("^", "~"):
        shown = f'<mover accent="true">{shown}<mo stretchy="false">{mark}</mo></mover>'
    scripts = [_row(sub.strip("{}"))] if sub else []
    if sup or mark == "*":
        scripts.append(_row(sup) if sup else "<mo>∗</mo>")
    tag = ("munder" if above else "msub") if sub else "msup"
    tag = "msubsup" if len(scripts) == 2 else tag
    return f"<{tag}>{shown}{''.join(scripts)}</{tag}>" if scripts else shown


def _sign(base: str) -> str:
    if base in LIMITS:
        return f'<mo movablelimits="false">{LIMITS[base]}</mo>'
    if base.isdigit():
        return f"<mn>{base}</mn>"
    if base.isalpha() and base not in SYMBOLS:
        return f"<mi>&{base};</mi>" if base in GREEK else f"<mi>{base}</mi>"
    space = ' lspace="0" rspace="0"' if base in ("|", "||") else ""
    return f'<mo stretchy="false"{space}>{escape(SYMBOLS.get(base, base))}</mo>'
