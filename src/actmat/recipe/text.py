"""YAML of recipes and options, read in bounded time and memory: plain data, or the line of the first error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Most values of one text."""

MAX_DEPTH = 50
"""Deepest nesting of lists and mappings; a recipe needs five."""

MAX_BITS = 64
"""Largest integer: longer ones cannot be a seed, rank or size, and overflow as floats."""

REFUSED = ("binary", "omap", "pairs", "set", "timestamp")
"""Types of YAML that JSON lacks: no field of a recipe accepts them."""

_TAG = "tag:yaml.org,2002:"
_EXPECTED = "texts, numbers, true, false, null, lists and mappings"
_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} deep"
_TOO_MANY = f"expected at most {MAX_VALUES:,} values"
_ALIAS = "an alias (*name) is not supported: write the value out"  # nests of aliases unfold to giants
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
_RESOLVERS = {
    first: [(f"{_TAG}float", _EXPONENT), *(r for r in resolvers if r[0] != f"{_TAG}timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
"""Types of plain scalars by their first character; a date is a text, and `1e-6` a number (YAML 1.1 wants `1.0e-6`)."""


class UnreadableError(Exception):
    """A text is not YAML, or holds a value that a recipe cannot.

    Args:
        problem: in words.
        line: from 1.
    """

    def __init__(self, problem: str, line: int) -> None:
        self.problem, self.line = problem, line
        super().__init__(f"line {line}: {problem}")


def parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """Nodes of one document, which know their lines, and its values: text, number, true, false, null, list, mapping.

    >>> parse_yaml("{rank: 4, name: 2024-05-01}")[1]
    {'rank': 4, 'name': '2024-05-01'}

    Raises:
        UnreadableError: with the line of the first problem.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return node, None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise UnreadableError(f"the character {chr(error.character)!r} is not allowed", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(p for p in (error.context, error.problem) if p)
        raise UnreadableError(problem, 1 if mark is None else mark.line + 1) from None


def _refuse(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Loader(yaml.SafeLoader):
    """A safe loader with bounds, whose every error is a `MarkedYAMLError` or a `ReaderError`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.yaml_implicit_resolvers = _RESOLVERS
        self._depth = self._count = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MAX_DEPTH:  # before the scanner looks ahead for keys, at each level again
            raise yaml.scanner.ScannerError(None, None, _TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.get_mark()
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, _ALIAS, mark)
        self._count += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        if self._count > MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, _TOO_MANY, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if _kind(node) in REFUSED:
            raise _refuse(f"found a value of type {_kind(node)}; a recipe holds {_EXPECTED}", node)
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            # what PyYAML raises for a scalar that its tag does not fit
            raise _refuse(f"{_shown(node)} is not a valid {_kind(node)}", node) from None
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _refuse(f"an integer has at most {MAX_BITS} bits; found {_shown(node)}", node)
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
            raise _refuse(f"a text holds a NUL or half of a surrogate pair: {value[:40]!r}", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if strange := [key for key in mapping if not isinstance(key, str)]:
            raise _refuse(f"a key is a text; found {strange[0]!r}", node)
        return mapping


def _kind(node: yaml.Node) -> str:
    return str(node.tag).removeprefix(_TAG)


def _shown(node: yaml.Node) -> str:
    text = node.value if isinstance(node.value, str) else ""
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}... ({len(text)} characters)"
