"""Files can be read in one sitting, public things are documented and annotated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.repository import ROOT, modules, source_lines, tree

LONGEST = 500

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Public classes and functions of a module, and public members of those classes, with dotted names."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child, f"{prefix}{child.name}.")


def decorators(node: Definition) -> set[str]:
    return {ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list}


def missing(tree: ast.Module) -> list[str]:
    """What a module lacks: docstrings (an `@override` inherits one) and annotations of public functions."""
    found = [] if ast.get_docstring(tree) else ["the module has no docstring"]
    for name, node in public_definitions(tree):
        if not ast.get_docstring(node) and not decorators(node) & {"override", "overload", "setter"}:
            found.append(f"{name} (line {node.lineno}) has no docstring")
        if isinstance(node, ast.ClassDef):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if "." in name and "staticmethod" not in decorators(node):
            arguments = arguments[1:]  # self or cls
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a]
        bare = [a.arg for a in arguments if a.annotation is None]
        if bare:
            found.append(f"{name} (line {node.lineno}) does not annotate {', '.join(bare)}")
        if node.returns is None:
            found.append(f"{name} (line {node.lineno}) does not annotate its result")
    return found


def test_no_file_is_too_long() -> None:
    long = {str(p.relative_to(ROOT)): source_lines(p) for p in modules() if source_lines(p) > LONGEST}
    assert not long, f"more than {LONGEST} lines, split along the concepts: {long}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_public_things_are_documented_and_annotated(path: Path) -> None:
    found = missing(tree(path))
    assert not found, f"{path.relative_to(ROOT)}:\n" + "\n".join(found)


def test_missing_docstrings_and_annotations_are_seen() -> None:
    source = '''
class A:
    """Documented."""
    def bare(self, x: int) -> int: ...
    def _private(self): ...
    @override
    def inherited(self) -> None: ...
    @staticmethod
    def unbound(x) -> None:
        """Documented."""
def open_end(*args, **options: int):
    """Documented."""
'''
    assert missing(ast.parse(source)) == [
        "the module has no docstring",
        "A.bare (line 4) has no docstring",
        "A.unbound (line 9) does not annotate x",
        "open_end (line 11) does not annotate args",
        "open_end (line 11) does not annotate its result",
    ]
