r"""`rank_pattern` and `alpha_pattern` of an adapter, as PEFT reads them, in bounded time.

PEFT takes the first entry for which `re.match(rf"(.*\.)?({pattern})$", module)` finds something: a regular expression
that describes the end of the module's name, after a dot. Most entries are names, in which a dot without a backslash
stands for any character; they are looked up, so that thousands of them cost little.

Source: PEFT (https://github.com/huggingface/peft), `get_pattern_key`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.layout.patterns import MatchError, Regex

MOST_ENTRIES = 200_000
"""Entries of one table; models with the most experts have half as many modules."""
MOST_INSTRUCTIONS = 20_000
"""Instructions of all compiled patterns that are not names. A pattern has about one per letter."""
MOST_STEPS = 4_000_000_000
"""Instructions of all patterns times letters of all modules: a second if each one were a step of the matcher."""
LOOKUP_STEPS = 5_000
"""Steps that one look-up takes: one for every pattern that is not a name, and for every distribution of the dots among
names of the same length."""

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
        self._values, self._name, self._steps, self._size = list(entries.values()), name, 0, 0
        if len(self._values) > MOST_ENTRIES:
            raise self._refusal(f"{len(self._values):,} entries, more than {MOST_ENTRIES:,}")
        self._tables: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        self._others: list[tuple[int, Regex]] = []
        for index, pattern in enumerate(entries):
            if not self._add_name(pattern, index):
                self._add_regex(pattern, index)

    def of_module(self, module: str, default: Any) -> Any:
        """The value of the first pattern that describes the end of the module's name, or the default.

        Raises:
            MatchError: the patterns have taken too many steps.
        """
        named, shapes = self._first_name(module, len(self._values))
        self._steps += (shapes + len(self._others)) * LOOKUP_STEPS + self._size * len(module)
        if self._steps > MOST_STEPS:
            raise self._costs("they take too long on the names of the modules")
        first = next((i for i, regex in self._others if i < named and regex.matches(module)), named)
        return self._values[first] if first < len(self._values) else default

    def _add_regex(self, pattern: str, index: int) -> None:
        """Compile a pattern that is not a name."""
        try:
            Regex(pattern)  # by itself: `a)|(b` is not a pattern
            regex = Regex(rf"(?:.*\.)?(?:{pattern})")
        except MatchError as error:
            raise self._refusal(
                f"the entry {pattern[:200]!r}, which is not a pattern that can be matched: {error}"
            ) from None
        self._others.append((index, regex))
        self._size += regex.size
        if self._size > MOST_INSTRUCTIONS:
            raise self._costs("together they are too large")

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

    def _costs(self, why: str) -> MatchError:
        return self._refusal(f"{len(self._values):,} patterns: {why}. Write names, with '\\.' for a dot")

    def _refusal(self, what: str) -> MatchError:
        return MatchError(f"{self._name} of {ADAPTER_CONFIG} has {what}")
