"""HTML by construction: every text that is not `Markup` is escaped, every element is closed.

`el("p", "a < b", class_="x")` gives `<p class="x">a &lt; b</p>`, as `Markup`, which other elements take as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup, escape

__all__ = ["Child", "Markup", "data_block", "el", "join"]

Child = str | int | Markup | None

_VOID = frozenset({"meta", "rect", "path", "line", "input", "wbr"})
_IN_SCRIPT = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def el(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        tag: name of the element.
        children: texts (escaped), elements, or None for nothing.
        attributes: `class_` and `for_` lose their underscore at the end, others turn into dashes; None and False leave
            the attribute out, True gives it without a value.
    """
    opening = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{opening}>" if tag in {"meta", "input", "wbr"} else f"<{tag}{opening}/>")
    return Markup(f"<{tag}{opening}>{join(children)}</{tag}>")


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(value)}"'


def join(children: Iterable[Child]) -> Markup:
    """Several children as one; texts are escaped."""
    return Markup("").join(escape(c) for c in children if c is not None)


def data_block(name: str, data: Any) -> Markup:
    """Data for the script, in an element that no browser executes and no string can end.

    `<`, `>` and `&` are written as JSON escapes, so that `</script>` or `<!--` in a name stays part of a string.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT)
    return Markup(f'<script type="application/json" id="{escape(name)}">{text}</script>')
