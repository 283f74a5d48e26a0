r"""`rank_pattern` and `alpha_pattern` of an adapter, as PEFT reads them, in bounded time.

PEFT takes the first entry for which `re.match(rf"(.*\.)?({pattern})$", module)` finds something: a regular expression
that describes the end of the module's name, after a dot. Most entries are names, in which a dot without a backslash
stands for any character; they are looked up, so that thousands of them cost little. All others are matched together,
in one automaton.

Source: PEFT (https://github.com/huggingface/peft), `get_pattern_key`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actmat.layout.patterns import MatchError, Regex, RegexSet

MOST_ENTRIES = 200_000
"""Entries of one table; models with the most experts have half as many modules."""
MOST_INSTRUCTIONS = 100_000
"""Instructions of all compiled patterns that are not names: half a second. A pattern has about one per letter."""
MOST_STEPS = 4_000_000_000
"""Letters of all patterns times letters of all modules: a second if each one were a step of the matcher."""
SHAPE_STEPS = 5_000
"""Steps that one look-up takes: one for every distribution of the dots among names of the same length."""

_NAME = re.compile(r"(?:[\w.-]|\\[^\w\s])+", re.ASCII)
_LETTER = re.compile(r"\\(.)|(\.)|(.)")
_DOT = "\n"
"""Stands for any character in a name that is looked up; no dot of a pattern matches a newline."""


class PatternTable:
    """Patterns and their values, in order."""

    def __init__(self, entries: Mapping[str, Any] | None = None, name: str = "rank_pattern") -> None:
        """Compile all patterns of the field called `name`.

        Raises:
            MatchError: a pattern cannot be matched; says which.
        """
        entries = entries or {}
        self._values, self._name, self._steps = list(entries.values()), name, 0
        if len(self._values) > MOST_ENTRIES:
            raise MatchError(f"has {len(self._values):,} entries, more than {MOST_ENTRIES:,}")
        self._tables: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        others = [(i, p) for i, p in enumerate(entries) if not self._add_name(p, i)]
        self._others = [i for i, _ in others]
        self._letters = sum(len(p) for _, p in others)
        self._set = _compiled([p for _, p in others])

    def of_module(self, module: str, default: Any) -> Any:
        """The value of the first pattern that describes the end of the module's name, or the default.

        Raises:
            MatchError: the patterns have taken too many steps.
        """
        named, shapes = self._first_name(module, len(self._values))
        self._steps += shapes * SHAPE_STEPS + self._letters * len(module)
        if self._steps > MOST_STEPS:
            raise self._refusal("they take too long on the names of the modules")
        try:
            other = self._set.first(module) if self._set is not None else None
        except MatchError as error:
            raise self._refusal(str(error)) from None
        first = min(named, len(self._values) if other is None else self._others[other])
        return self._values[first] if first < len(self._values) else default

    def _add_name(self, pattern: str, index: int) -> bool:
        """Note a pattern that is a name, by its length and by the positions of its dots; False for any other."""
        if _NAME.fullmatch(pattern) is None:
            return False
        letters = [_DOT if m[2] else m[1] or m[3] for m in _LETTER.finditer(pattern)]
        dots = tuple(i for i, letter in enumerate(letters) if letter == _DOT)
        self._tables.setdefault(len(letters), {}).setdefault(dots, {}).setdefault("".join(letters), index)
        return True

    def _first_name(self, module: str, none: int) -> tuple[int, int]:
        """Index of the first name that describes the end of the module's name, or `none`; number of look-ups."""
        ends = [module, *(module[i + 1 :] for i, c in enumerate(module) if c == ".")] if self._tables else []
        best, shapes = none, 0
        for end in ends:
            for dots, table in self._tables.get(len(end), {}).items():
                shapes += 1
                letters = list(end)
                if "\n" in letters:
                    continue
                for i in dots:
                    letters[i] = _DOT
                best = min(best, table.get("".join(letters), best))
        return best, shapes

    def _refusal(self, why: str) -> MatchError:
        return MatchError(
            f"{self._name} of adapter_config.json has {len(self._values):,} patterns, of which {len(self._others):,} "
            f"are regular expressions: {why}. Write names, with '\\.' for a dot"
        )


def _compiled(patterns: list[str]) -> RegexSet | None:
    """All patterns as one automaton, None without any; each is tried by itself: `a)|(b` is not a pattern.

    Raises:
        MatchError: one cannot be matched, or all together are too large.
    """
    size = 0
    for pattern in patterns:
        try:
            size += Regex(pattern).size
        except MatchError as error:
            raise MatchError(
                f"has the entry {pattern[:200]!r}, which is not a pattern that can be matched: {error}"
            ) from None
        if size > MOST_INSTRUCTIONS:
            break
    try:
        if size > MOST_INSTRUCTIONS:
            raise MatchError("together they are too large")
        return RegexSet([rf"(?:.*\.)?(?:{p})" for p in patterns]) if patterns else None
    except MatchError as error:
        raise MatchError(f"has {len(patterns):,} regular expressions: {error}; write names, with '\\.'") from None
