"""Docstrings say their subject first, functions and files are short, the whole stays small."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.repository import PACKAGE, ROOT, module_name, modules, tracked_files, tree

# Docstrings say their subject first, functions are short, few things are suppressed, the whole stays small.


CLAUSES = ("What", "Who", "Where", "Whether", "How")
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 8
MOST_SUPPRESSED = 15
ROOMS: dict[str, int] = {
    "core": 22_800,
    "extras": 15_360,
    "api and cli": 3_235,
    "src": 41_200,
    "packages": 11_590,
    "tests": 46_250,
    "benchmarks": 6_350,
    "whole tree": 108_490,
}
"""Most lines of code of each part; the core is all of `src` but `extras`, `api` and `cli`. What is added is paid for by
what is removed: lower a bound when something goes."""

WIDE: dict[str, str] = {
    "actmat_experiments.adamerging.learn": "keyword arguments of a public function",
    "actmat_experiments.commands.experiment.run": "a parameter is a flag",
    "actmat.methods.actmat.rule": "options of a method are parameters of its function",
    "actmat.extras.research.knots.merge": "options of a method are parameters of its function",
    "actmat.extras.research.knots.merge_lowrank": "options of a method are parameters of its function",
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
        if length(function) > LONGEST_FUNCTION:
            found.append(f"{name} has {length(function)} lines, more than {LONGEST_FUNCTION}")
        if parameters(function) > MOST_PARAMETERS and name not in WIDE:
            found.append(f"{name} has {parameters(function)} parameters, more than {MOST_PARAMETERS}")
    assert not found, "\n".join(found)


def test_no_exception_is_out_of_date() -> None:
    known = all_functions()
    needless = [n for n in WIDE if n not in known or parameters(known[n]) <= MOST_PARAMETERS]
    assert not needless, f"these need no exception: {needless}"


def test_few_type_checks_are_suppressed() -> None:
    found = Counter({str(p.relative_to(ROOT)): p.read_text().count("# type: ignore") for p in modules()})
    assert found.total() <= MOST_SUPPRESSED, f"`type: ignore` more than {MOST_SUPPRESSED} times: {by_file(+found)}"


def test_outputs_have_the_same_bytes_on_every_system() -> None:
    """Python ends lines as the system does, unless it is told: Windows' outputs would have other hashes."""
    calls = ((p, n) for p in modules(PACKAGE) if "extras" not in p.parts for n in ast.walk(tree(p)))
    written = [(p, n) for p, n in calls if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "write_text"]
    named = [(p, n.lineno, {k.arg for k in n.keywords}) for p, n in written]
    assert len(named) > 5
    assert not [(p, line) for p, line, names in named if "encoding" in names and "newline" not in names]


def long_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that stand on several lines, or nowhere (a module, the arguments of a function)."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        waiting += [n for n in ast.iter_child_nodes(node) if getattr(n, "lineno", 0) != getattr(n, "end_lineno", 1)]


def code_lines(path: Path) -> int:
    """Lines on which code stands, imports included: without blank lines, comments and docstrings."""
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
    code = {number for number, line in lines if line.strip() and line.lstrip()[0] != "#"}
    documentation: set[int] = set()
    for node in long_nodes(tree(path)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            code.update(range(node.lineno, (node.end_lineno or 0) + 1))  # with the blank lines of a text
        elif isinstance(node, ast.Module | ast.ClassDef | Function) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documentation.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(code - documentation)


def passes_names_on(tree: ast.Module) -> bool:
    """True if `__all__` names anything that the file has imported."""
    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return any(isinstance(v, ast.List) and imported & {ast.literal_eval(e) for e in v.elts} for v in lists)


def test_lists_of_names_stand_where_names_are_passed_on() -> None:
    files = [p for p in modules(PACKAGE) if p.name != "__init__.py" and "__all__" in p.read_text()]
    assert not [p for p in files if not passes_names_on(tree(p))], "an underscore says the same with less"


def test_every_room_keeps_to_its_bound() -> None:
    found = dict.fromkeys(ROOMS, 0)
    for path in (p for p in tracked_files() if p.suffix == ".py"):
        lines, (top, *rest) = code_lines(path), path.relative_to(ROOT).parts
        inner = rest[1] if top == "src" and len(rest) > 1 else ""
        room = {"extras": "extras", "api": "api and cli", "cli": "api and cli"}.get(inner, "core")
        for name in {"whole tree", top, room if top == "src" else top} & found.keys():
            found[name] += lines
    assert found["whole tree"] > 50_000
    assert not {name: (found[name], most) for name, most in ROOMS.items() if found[name] > most}


SOURCE = '''
"""Whether it is seen."""
LIMIT = 3
"""How many."""
class A:
    """Whatever begins otherwise passes."""
    def method(self, a, b, *rest, c=1, **options):
        """Return a."""
        def inner(): return a
        if a or b:
            return c
'''


def test_offences_are_seen() -> None:
    tree = ast.parse(SOURCE)
    assert clauses(tree) == ["Whether it is seen.", "How many."]
    found = {name: (length(f), parameters(f)) for name, f in functions(tree, "m")}
    assert found == {"m.A.method": (5, 3), "m.A.method.inner": (1, 0)}


def test_lines_of_code(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(f"import ast\n# why\n{SOURCE}")
    assert code_lines(path) == 9, "the import, two texts, LIMIT, class, method, inner, the branch, the return"


def test_every_exception_has_a_reason() -> None:
    assert all(WIDE.values())


# Files can be read in one sitting, public things are documented and annotated.


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
    lengths = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8").count("\n") for p in modules()}
    long = {name: n for name, n in lengths.items() if n > LONGEST}
    assert not long, f"more than {LONGEST} lines, split along the concepts: {long}"


def test_public_things_are_documented_and_annotated() -> None:
    assert {str(p.relative_to(ROOT)): found for p in modules() if (found := missing(tree(p)))} == {}


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
