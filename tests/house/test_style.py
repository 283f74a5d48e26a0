"""Files and functions can be read in one sitting, a type name has one meaning, the whole stays small.

Ruff counts parameters and branches, and wants docstrings; mypy wants annotations.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.repository import PACKAGE, ROOT, module_name, modules, tracked_files, tree, type_names
from tests.mutants import MUTANTS

LONGEST_FUNCTION, LONGEST_FILE = 60, 500
BOUNDS = {"core": 20_900, "src": 39_300, "whole tree": 103_000}
"""Most lines of code; the core is all of `src` but `extras`, `api` and `cli`. What is added is paid for by what is
removed: lower a bound when something goes."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def documentation(node: ast.AST) -> range:
    """Lines of the docstring of a node, if it has one."""
    if not (isinstance(node, Documented) and node.body and ast.get_docstring(node, clean=False) is not None):
        return range(0)
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def long_nodes(module: ast.AST) -> Iterator[ast.AST]:
    """The nodes that stand on several lines, or nowhere (a module, the arguments of a function)."""
    waiting = [module]
    while waiting:
        yield (node := waiting.pop())
        waiting += [n for n in ast.iter_child_nodes(node) if getattr(n, "lineno", 0) != getattr(n, "end_lineno", 1)]


def code_lines(path: Path) -> int:
    """Lines on which code stands, imports included: without blank lines, comments and docstrings."""
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
    code = {number for number, line in lines if line.strip() and line.lstrip()[0] != "#"}
    docstrings: set[int] = set()
    for node in long_nodes(tree(path)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            code.update(range(node.lineno, (node.end_lineno or 0) + 1))  # with the blank lines of a text
        docstrings.update(documentation(node))
    return len(code - docstrings)


def test_files_and_functions_are_short() -> None:
    long = [str(p.relative_to(ROOT)) for p in modules() if p.read_text(encoding="utf-8").count("\n") > LONGEST_FILE]
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION:
                long.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not long, f"more than {LONGEST_FILE} lines of a file, or {LONGEST_FUNCTION} of a function: {long}"


def test_the_tree_keeps_to_its_bounds() -> None:
    lines = dict.fromkeys(BOUNDS, 0)
    for path in (p for p in tracked_files() if p.suffix == ".py"):
        outer = path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in ("extras", "api", "cli")
        in_src = path.is_relative_to(PACKAGE)
        for name, counts in (("core", in_src and not outer), ("src", in_src), ("whole tree", True)):
            lines[name] += code_lines(path) * counts
    assert lines["whole tree"] > 50_000
    assert not {name: (count, BOUNDS[name]) for name, count in lines.items() if count > BOUNDS[name]}


def test_lines_of_code(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text('"""Doc.\n\nMore."""\nimport ast\n# why\n\ndef f():\n    """Doc."""\n    return """a\n\nb"""\n')
    assert code_lines(path) == 5, "the import, the definition, a text of three lines"


def test_every_mutant_has_its_text_once() -> None:
    assert not [name for name, file, text, *_ in MUTANTS if (ROOT / file).read_text("utf-8").count(text) != 1]


def test_no_type_name_is_defined_twice() -> None:
    files = defaultdict(set)
    for path in modules(PACKAGE):
        for name in type_names(tree(path)):
            files[name].add(module_name(path))
    assert len(files) > 300
    assert not {name: sorted(places) for name, places in files.items() if len(places) > 1}


def test_outputs_have_the_same_bytes_on_every_system() -> None:
    """Python ends lines as the system does, unless it is told: Windows' outputs would have other hashes."""
    calls = ((p, n) for p in modules(PACKAGE) if "extras" not in p.parts for n in ast.walk(tree(p)))
    written = [(p, n) for p, n in calls if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "write_text"]
    named = [(p, n.lineno, {k.arg for k in n.keywords}) for p, n in written]
    assert len(named) > 5
    assert not [(p, line) for p, line, names in named if "encoding" in names and "newline" not in names]
