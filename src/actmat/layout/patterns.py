r"""Patterns of tensor names, as recipes use them.

A pattern describes the *whole* name:

* shell globs: `*` is any run of characters, dots included; `?` one character; `[abc]`, `[a-z]`, `[!abc]` one of a set;
* `{q,k,v}` is any of the alternatives, which may hold globs and braces of their own;
* a backslash takes the next character literally;
* `re:` starts a regular expression, matched against the whole name in time linear in its length: no lookaround, no
  backreferences (`actmat.layout.matching`).

`*.mlp.{up,gate}_proj.weight` and `re:.*\.layers\.(1[0-9])\..*` are examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from actmat.errors import RecipeError
from actmat.layout.matching import MatchError, Regex


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Callable[[str], bool]:
    """A predicate of names, compiled once per pattern.

    >>> [compile_pattern("*.{up,gate}_proj.weight")(n) for n in ("mlp.up_proj.weight", "mlp.down_proj.weight")]
    [True, False]

    Raises:
        RecipeError: the pattern is empty, its braces or brackets do not balance, or its regular expression is invalid.
    """
    source = text.removeprefix("re:") if text.startswith("re:") else _glob_to_regex(text)
    if not source:
        raise RecipeError("Empty name pattern: write '*' to match every tensor.")
    try:
        return Regex(source, dot_all=True).matches
    except MatchError as error:
        raise RecipeError(
            f"Name pattern {text[:200]!r} is not valid: {error}. Globs need no prefix; 're:' starts a "
            "regular expression."
        ) from error


# one step of a glob: an escaped character, a set, or any other single character
_TOKEN = re.compile(r"\\(?P<escaped>.)|\[(?P<set>!.[^\]]*|[^!][^\]]*)\]|(?P<char>.)", re.DOTALL)
_SPECIAL = {"*": ".*", "?": ".", "{": "(?:", "}": ")"}


def _glob_to_regex(text: str) -> str:
    out: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(text):
        char = token["char"]
        if char is None:
            out.append(re.escape(token["escaped"]) if token["escaped"] else _character_set(token["set"]))
        elif char == "[":
            raise _unbalanced(text, "[", "]")
        elif char == "\\":
            raise RecipeError(f"Name pattern {text!r} ends in a backslash, which must be followed by a character.")
        elif char == "}" and not depth:
            raise _unbalanced(text, "}", "{")
        else:
            depth += (char == "{") - (char == "}")
            out.append("|" if char == "," and depth else _SPECIAL.get(char) or re.escape(char))
    if depth:
        raise _unbalanced(text, "{", "}")
    return "".join(out)


def _character_set(body: str) -> str:
    negated = body.startswith("!")
    # '-' keeps its meaning of a range; characters that are special only to `re` are escaped
    members = re.sub(r"([\\^&~|\[])", r"\\\1", body[1:] if negated else body)
    return f"[{'^' if negated else ''}{members}]"


def _unbalanced(text: str, found: str, missing: str) -> RecipeError:
    return RecipeError(
        f"Name pattern {text!r} has a {found!r} without its {missing!r}; write '\\{found}' for the character itself."
    )
