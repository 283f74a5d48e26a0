r"""`rank_pattern` and `alpha_pattern` of an adapter, as PEFT reads them, in bounded time.

PEFT takes the first entry for which `re.match(rf"(.*\.)?({pattern})$", module)` finds something: a regular expression
that describes the end of the module's name, after a dot. Most entries are names with escaped dots; they are looked up.

Source: PEFT (https://github.com/huggingface/peft), `get_pattern_key`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from actmat.layout.matching import MatchError, Regex

__all__ = ["PatternTable"]

MOST_INSTRUCTIONS = 1_000_000
"""Of all patterns of a table together; a name that is no literal has about as many as it has letters."""
MOST_STEPS = 10_000_000_000
"""Instructions times characters, over all modules: half a minute if each one were a step of the matcher."""

_LITERAL = re.compile(r"(?:[\w-]|\\[^\w\s])+", re.ASCII)


class PatternTable(Mapping[str, Any]):
    """Patterns and their values, in order."""

    def __init__(self, entries: Mapping[str, Any] | None = None, name: str = "rank_pattern") -> None:
        """Compile all patterns of the field called `name`.

        Raises:
            MatchError: a pattern cannot be matched; says which.
        """
        self._entries, self._name, self._steps = dict(entries or {}), name, 0
        self._literals: dict[str, int] = {}
        self._regexes: dict[int, Regex] = {}
        self._values = list(self._entries.values())
        for i, pattern in enumerate(self._entries):
            if _LITERAL.fullmatch(pattern):
                self._literals.setdefault(re.sub(r"\\(.)", r"\1", pattern), i)
            else:
                self._regexes[i] = _compiled(pattern)
        if sum(r.size for r in self._regexes.values()) > MOST_INSTRUCTIONS:
            raise MatchError(
                f"has {len(self._regexes):,} regular expressions, which together are too large; write names, with '\\.'"
            )

    def of_module(self, module: str, default: Any) -> Any:
        """The value of the first pattern that describes the end of the module's name, or the default.

        Raises:
            MatchError: the patterns have taken too many steps.
        """
        ends = [module, *(module[i + 1 :] for i, c in enumerate(module) if c == ".")]
        first = min((self._literals[e] for e in ends if e in self._literals), default=len(self._values))
        for i, regex in self._regexes.items():
            if i > first:
                break
            self._steps += regex.size * len(module)
            if self._steps > MOST_STEPS:
                raise MatchError(
                    f"{self._name} of adapter_config.json has {len(self._regexes):,} regular expressions "
                    "that take too long on the names of the modules. Write names, with '\\.' for a dot"
                )
            if regex.matches(module):
                first = i
        return self._values[first] if first < len(self._values) else default

    def __getitem__(self, pattern: str) -> Any:
        return self._entries[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _compiled(pattern: str) -> Regex:
    try:
        Regex(pattern)  # by itself: `a)|(b` would be valid inside the parentheses below
        return Regex(rf"(?:.*\.)?(?:{pattern})")
    except MatchError as error:
        raise MatchError(f"has the entry {pattern[:200]!r}, which is no pattern that can be matched: {error}") from None
