r"""Texts from outside (names of tensors, paths, options, messages of libraries), made safe to show.

A name in a downloaded file can hold escape sequences that rewrite a terminal, newlines that forge a line of output,
marks that reverse the reading direction, and Markdown or HTML. Each function returns text that shows such characters
in place of having their effect; ordinary text, in any script, is returned unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

_MARKDOWN = re.compile(r"[\\`*\[\]|~#$]|(?<![^\W_])_|_(?![^\W_])")
"""Signs with a meaning in Markdown; an underscore inside a word has none."""


def terminal(text: object, *, keep: str = "") -> str:
    r"""Text in one line; characters that are not printable are written as in a Python string.

    These are control characters (C0, C1, DEL), marks of reading direction and of zero width, line separators, halves of
    surrogate pairs. The characters in `keep` stay.

    >>> print(terminal("layer\x1b[2K\nall good"))
    layer\x1b[2K\nall good
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def markdown(text: object) -> str:
    r"""Text for one line of Markdown, a cell of a table included, in which every sign stands for itself.

    >>> print(markdown("a|b <b>\n# c"))
    a\|b &lt;b&gt;\\n\# c
    """
    escaped = _MARKDOWN.sub(r"\\\g<0>", terminal(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def html(text: object) -> Markup:
    r"""Text for an element or a quoted attribute; `Markup` is returned unchanged. Newlines and tabs stay.

    >>> print(html("<b>\x1b"))
    &lt;b&gt;\x1b
    """
    return text if isinstance(text, Markup) else escape(terminal(text, keep="\n\t"))


def html_table(title: object, head: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A title and a table for notebooks; only the title without rows.

    >>> print(html_table("<b>", ["n"], [[1]]))
    <p><b>&lt;b&gt;</b></p><table><tr><th>n</th></tr><tr><td>1</td></tr></table>
    """
    lines = [Markup("<tr>{}</tr>").format(Markup("").join(Markup("<th>{}</th>").format(html(h)) for h in head))]
    cells = [Markup("").join(Markup("<td>{}</td>").format(html(c)) for c in row) for row in rows]
    lines += [Markup("<tr>{}</tr>").format(row) for row in cells]
    table = Markup("<table>{}</table>").format(Markup("").join(lines)) if cells else Markup("")
    return Markup("<p><b>{}</b></p>{}").format(html(title), table)


def in_one_line(text: object) -> str:
    r"""Text of a library's message in one line: a space in place of newlines and indentation.

    >>> in_one_line("while parsing:\n    expected ]")
    'while parsing: expected ]'
    """
    return " ".join(str(text).split())
