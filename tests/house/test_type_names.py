"""A type name has one meaning in the package: no class or type alias is defined twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.helpers.repository import PACKAGE, module_name, modules, tree


def type_names(module: ast.Module) -> Iterator[str]:
    """Names of classes, and of module-level aliases in CamelCase."""
    yield from (node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        yield from (n for n in names if n[0].isupper() and not n.isupper() and any(c.islower() for c in n))


def test_no_type_name_is_defined_twice() -> None:
    found = defaultdict(set)
    for path in modules(PACKAGE):
        for name in type_names(tree(path)):
            found[name].add(module_name(path))
    assert len(found) > 300
    assert not {name: sorted(files) for name, files in found.items() if len(files) > 1}


def test_names_are_seen() -> None:
    source = "class A:\n    class B: ...\nAlias = int | str\nLIMIT = 3\nOther: TypeAlias = A\nvalue = 1\n"
    assert list(type_names(ast.parse(source))) == ["A", "B", "Alias", "Other"]
