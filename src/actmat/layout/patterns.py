r"""One pattern language for tensor names, used wherever a recipe speaks of tensors.

A pattern describes the *whole* name:

* shell globs: `*` is any run of characters, dots included; `?` one character; `[abc]`, `[a-z]`, `[!abc]` one of a set;
* `{q,k,v}` is any of the alternatives, which may hold globs and braces of their own;
* a backslash takes the next character literally;
* `re:` starts a regular expression (Python's `re`, matched against the whole name).

`*.mlp.{up,gate}_proj.weight` and `re:.*\.layers\.(1[0-9])\..*` are examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from actmat.errors import RecipeError

__all__ = ["compile_pattern"]


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Callable[[str], bool]:
    """The predicate "does this name match", compiled once per pattern.

    Raises:
        RecipeError: the pattern is empty, its braces or brackets do not balance, or its regular expression is invalid.
    """
    source = text.removeprefix("re:") if text.startswith("re:") else _glob_to_regex(text)
    if not source:
        raise RecipeError("Empty name pattern: write '*' to match every tensor.")
    try:
        regex = re.compile(source, re.DOTALL)
    except re.error as error:
        raise RecipeError(
            f"Name pattern {text!r} is not valid: {error}. Globs need no prefix; 're:' starts a regular expression."
        ) from error
    return lambda name: regex.fullmatch(name) is not None


def _glob_to_regex(text: str) -> str:
    out: list[str] = []
    depth = 0
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char == "*":
            out.append(".*")
        elif char == "?":
            out.append(".")
        elif char == "[":
            end = text.find("]", position + (2 if text.startswith("!", position) else 1))
            if end < 0:
                raise _unbalanced(text, "[", "]")
            out.append(_character_set(text[position:end]))
            position = end + 1
        elif char == "\\":
            if position == len(text):
                raise RecipeError(f"Name pattern {text!r} ends in a backslash, which must be followed by a character.")
            out.append(re.escape(text[position]))
            position += 1
        elif char == "{":
            depth += 1
            out.append("(?:")
        elif char == "}":
            if depth == 0:
                raise _unbalanced(text, "}", "{")
            depth -= 1
            out.append(")")
        elif char == "," and depth:
            out.append("|")
        else:
            out.append(re.escape(char))
    if depth:
        raise _unbalanced(text, "{", "}")
    return "".join(out)


def _character_set(body: str) -> str:
    negated = body.startswith("!")
    # '-' keeps its meaning of a range; what is special to `re` alone is escaped
    members = re.sub(r"([\\^&~|\[])", r"\\\1", body[1:] if negated else body)
    return f"[{'^' if negated else ''}{members}]"


def _unbalanced(text: str, found: str, missing: str) -> RecipeError:
    return RecipeError(
        f"Name pattern {text!r} has a {found!r} without its {missing!r}; write '\\{found}' for the character itself."
    )
