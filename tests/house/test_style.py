"""Docstrings say their subject first, functions are short, few things are suppressed, layers have bounded sizes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.helpers.repository import PACKAGE, ROOT, module_name, modules, source_lines, tree

CLAUSES = ("What", "Who", "Where", "Whether", "How")
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 8
MOST_SUPPRESSED = 15
LAYER_CODE = 4_500
FORMATS_CODE = 6_000
EXPERIMENTS_CODE = 12_500
TESTS_PER_SOURCE = 0.65

LONG: dict[str, str] = {}
"""Function of more than `LONGEST_FUNCTION` lines -> reason."""

WIDE: dict[str, str] = {
    "actmat_experiments.adamerging.learn": "keyword arguments of a public function",
    "actmat_experiments.commands.experiment.run": "a parameter is a flag",
    "actmat_experiments.commands.experiment.study": "a parameter is a flag",
    "actmat.extras.collect.api_agreement.agreement": "keyword arguments of a public function",
    "actmat.methods.actmat.rule": "options of a method are parameters of its function",
    "actmat.methods.knots.merge": "options of a method are parameters of its function",
    "actmat.methods.knots.merge_lowrank": "options of a method are parameters of its function",
}
"""Function of more than `MOST_PARAMETERS` parameters -> reason."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and functions; and strings below constants, which document them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def clauses(tree: ast.Module) -> list[str]:
    """First lines of docstrings that begin with one of `CLAUSES`."""
    lines = (text.strip().partition("\n")[0] for text in docstrings(tree))
    return [line for line in lines if re.split(r"\W", line, maxsplit=1)[0] in CLAUSES]


def functions(tree: ast.AST, module: str) -> Iterator[tuple[str, Function]]:
    """Functions and methods with dotted names, also those inside functions."""
    for node in ast.iter_child_nodes(tree):
        name = f"{module}.{node.name}" if isinstance(node, Function | ast.ClassDef) else module
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, name)


def length(function: Function) -> int:
    """Lines from `def` to the end, with the docstring."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: Function) -> int:
    """Number of parameters without self, cls, `*args`, `**options`."""
    listed = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(a.arg not in ("self", "cls") for a in listed)


def checks_for(tree: ast.Module, name: str) -> int:
    """Number of `isinstance(..., NAME)`, also with NAME among several."""
    calls = (
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("isinstance", "issubclass")
    )
    return sum(bool(re.search(rf"\b{name}\b", ast.unparse(call.args[1]))) for call in calls)


def by_file(counts: Counter[str]) -> str:
    """Counts per file, the largest first."""
    return f"{counts.total()} in all\n" + "\n".join(f"{n:4} {file}" for file, n in counts.most_common())


def all_functions() -> dict[str, Function]:
    return {name: f for path in modules() for name, f in functions(tree(path), module_name(path))}


def test_docstrings_begin_with_their_subject() -> None:
    found = Counter({str(p.relative_to(ROOT)): len(clauses(tree(p))) for p in modules()})
    assert not found.total(), f"docstrings begin with {', '.join(CLAUSES)}: {by_file(+found)}"


def test_functions_are_short_and_have_few_parameters() -> None:
    found = []
    for name, function in all_functions().items():
        if length(function) > LONGEST_FUNCTION and name not in LONG:
            found.append(f"{name} has {length(function)} lines, more than {LONGEST_FUNCTION}")
        if parameters(function) > MOST_PARAMETERS and name not in WIDE:
            found.append(f"{name} has {parameters(function)} parameters, more than {MOST_PARAMETERS}")
    assert not found, "\n".join(found)


def test_no_exception_is_out_of_date() -> None:
    known = all_functions()
    needless = [n for n in LONG if n not in known or length(known[n]) <= LONGEST_FUNCTION]
    needless += [n for n in WIDE if n not in known or parameters(known[n]) <= MOST_PARAMETERS]
    assert not needless, f"these need no exception: {needless}"


def test_few_type_checks_are_suppressed() -> None:
    found = Counter({str(p.relative_to(ROOT)): p.read_text().count("# type: ignore") for p in modules()})
    assert found.total() <= MOST_SUPPRESSED, f"`type: ignore` more than {MOST_SUPPRESSED} times: {by_file(+found)}"


def test_only_experts_know_adapters() -> None:
    found = Counter(
        {
            str(p.relative_to(ROOT)): checks_for(tree(p), "AdapterExpert")
            for p in modules()
            if not p.is_relative_to(PACKAGE / "experts")
        }
    )
    assert not found.total(), f"isinstance(..., AdapterExpert) outside experts/: {by_file(+found)}"


def code_lines(tree: ast.Module) -> int:
    """Lines on which code stands: without blank lines, comments, docstrings and imports."""
    silent = set(documentation(tree))
    code: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            silent |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.alias | ast.arg | ast.keyword):
            code |= {node.lineno, node.end_lineno or node.lineno}
    return len(code - silent)


def documentation(tree: ast.Module) -> Iterator[int]:
    """Numbers of the lines of all docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or 0) + 1)


def test_layers_have_bounded_sizes() -> None:
    """A layer that outgrows its bound is two layers; how many there are is a matter of what the tool can do.

    Formats and codecs stand beside one another behind one protocol, so that there may be more of them.
    """
    sizes: Counter[str] = Counter()
    for path in modules():
        layer = path.relative_to(PACKAGE).parts[0] if path.is_relative_to(PACKAGE) else "experiments"
        if {"formats", "codecs"} & set(path.parts) and layer == "checkpoints":
            layer = "checkpoints: formats and codecs"
        sizes[layer] += code_lines(tree(path))
    assert sizes.pop("experiments") <= EXPERIMENTS_CODE
    assert sizes.pop("checkpoints: formats and codecs") <= FORMATS_CODE
    large = {name: lines for name, lines in sizes.items() if lines > LAYER_CODE}
    assert not large, f"more than {LAYER_CODE} lines of code: {large}"


def test_there_is_enough_test() -> None:
    source = sum(map(source_lines, modules()))
    tests = sum(map(source_lines, (ROOT / "tests").rglob("*.py")))
    assert tests >= TESTS_PER_SOURCE * source, f"{tests} lines of test for {source} lines of source"


SOURCE = '''
"""Whether it is seen."""
LIMIT = 3
"""How many."""
class A:
    """Whatever begins otherwise passes."""
    def method(self, a, b, *rest, c=1, **options):
        """Return a."""
        def inner(): return isinstance(a, int | AdapterExpert)
        return isinstance(a, (AdapterExpert, int)) or isinstance(a, OtherAdapterExpert)
'''


def test_offences_are_seen() -> None:
    tree = ast.parse(SOURCE)
    assert clauses(tree) == ["Whether it is seen.", "How many."]
    found = {name: (length(f), parameters(f)) for name, f in functions(tree, "m")}
    assert found == {"m.A.method": (4, 3), "m.A.method.inner": (1, 0)}
    assert checks_for(tree, "AdapterExpert") == 2
    assert code_lines(tree) == 5, "LIMIT, class, method, inner, the return"


@pytest.mark.parametrize("reasons", [LONG, WIDE])
def test_every_exception_has_a_reason(reasons: dict[str, str]) -> None:
    assert all(reasons.values())
