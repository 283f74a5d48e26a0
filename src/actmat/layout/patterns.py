r"""Patterns of tensor names, as recipes use them.

A pattern describes the *whole* name:

* shell globs: `*` is any run of characters, dots included; `?` one character; `[abc]`, `[a-z]`, `[!abc]` one of a set;
* `{q,k,v}` is any of the alternatives, which may hold globs and braces of their own;
* a backslash takes the next character literally;
* `re:` starts a regular expression, matched against the whole name in time linear in its length: no lookaround, no
  backreferences.

`*.mlp.{up,gate}_proj.weight` and `re:.*\.layers\.(1[0-9])\..*` are examples.

Python's `re` backtracks: `(.*)*X` takes time exponential in the length of a name. RE2 does not, and refuses what it
could not match so (lookaround, backreferences, huge repeats). `\w`, `\d`, `\s` and `\b` know ASCII only.

Source: RE2 (https://github.com/google/re2), syntax: https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import re2

from actmat.errors import RecipeError

LONGEST = 10_000
"""Most characters of a pattern."""
MEMORY = 1 << 18
"""Bytes of a compiled pattern, about 4,000 instructions; a step of the matcher costs at most that many."""

_OTHER_MEANING = (
    (re.compile(r"(?:^|[^\\])(?:\\\\)*\{,\d*\}"), "a repeat without its lower bound: write {0,n}"),
    (re.compile(r"\[:\^?\w+:\]"), "a POSIX class such as [:alpha:]: write its characters, such as a-zA-Z"),
)
"""Constructs to which `re` and RE2 give different meanings."""
_LIMITS = "no lookaround, no backreferences, no flags but i, m, s, and repeats of at most 1000, nested ones together"
"""Of RE2, which matches in linear time."""


class MatchError(ValueError):
    """A pattern that cannot be matched; says why, in one clause."""


class Regex:
    """A compiled pattern; `dot_all`: a dot matches newlines too.

    Raises:
        MatchError: on compilation.
    """

    def __init__(self, pattern: str, *, dot_all: bool = False) -> None:
        self._regexp = _compile(pattern, dot_all)

    @property
    def size(self) -> int:
        """Instructions of the compiled pattern: the largest cost per character of a text."""
        return int(self._regexp.programsize)

    def matches(self, text: str) -> bool:
        """True if the pattern describes the whole text; halves of surrogate pairs count as `?`."""
        return self._regexp.fullmatch(text.encode("utf-8", "replace")) is not None


@lru_cache(maxsize=4096)
def _compile(pattern: str, dot_all: bool) -> Any:
    if len(pattern) > LONGEST:
        raise MatchError(f"it has {len(pattern):,} characters, more than {LONGEST:,}")
    why = next((why for construct, why in _OTHER_MEANING if construct.search(pattern)), None)
    if why is not None:
        raise MatchError(f"it has {why}")
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem, options.dot_nl = False, True, MEMORY, dot_all
    try:
        return re2.compile(pattern.encode(), options)
    except UnicodeEncodeError:
        raise MatchError("it is not Unicode: it holds half of a surrogate pair") from None
    except re2.error as error:
        (message,) = error.args
        text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
        raise MatchError(f"{text[:200]} (RE2 has {_LIMITS})") from None


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


def _unbalanced(text: str, brace: str, missing: str) -> RecipeError:
    return RecipeError(
        f"Name pattern {text!r} has a {brace!r} without its {missing!r}; write '\\{brace}' for the character itself."
    )
