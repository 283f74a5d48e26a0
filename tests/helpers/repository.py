"""The repository as data: its root, its tracked files, its modules, what they import."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "actmat"
EXPERIMENTS = ROOT / "evidence" / "src" / "actmat_experiments"
SOURCES = (PACKAGE.parent, EXPERIMENTS.parent)
"""Folders from which the packages of all distributions are imported."""


def modules(*packages: Path) -> list[Path]:
    """Every Python file of the packages (default: all) that holds anything, in a fixed order."""
    return sorted(
        p for package in packages or (PACKAGE, EXPERIMENTS) for p in package.rglob("*.py") if p.stat().st_size
    )


def module_name(path: Path) -> str:
    """Dotted name under which a file is imported: `src/actmat/planning/__init__.py` -> `actmat.plan`."""
    source = next(s for s in SOURCES if path.is_relative_to(s))
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def package_name(path: Path) -> str:
    """Dotted package of a file, from which its relative imports start."""
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


@cache
def tree(path: Path) -> ast.Module:
    """Parsed file; several tests look at every one."""
    gc.disable()  # collections take three times as long as the parser
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


def tracked_files() -> list[Path]:
    """Files that git tracks or would add; outside a git checkout (an unpacked archive), all files but hidden ones."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        return [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    hidden = (p for p in ROOT.rglob("*") if p.is_file())
    return [p for p in hidden if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from actmat import methods` gives `actmat.methods`."""

    target: str
    line: int


def imports_of(source: str, package: str) -> list[Import]:
    """Every import of a module's source, wherever it stands (functions, `if TYPE_CHECKING`).

    Args:
        package: dotted package that the module lies in, to resolve relative imports.
    """
    return list(_walk(ast.parse(source), package))


def _walk(node: ast.AST, package: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for name in child.names:
                yield Import(name.name, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            module = ".".join([*above, *([child.module] if child.module else [])])
            for name in child.names:
                yield Import(f"{module}.{name.name}", child.lineno)
        else:
            yield from _walk(child, package)


def type_names(module: ast.Module) -> Iterator[str]:
    """Names of classes, and of module-level aliases in CamelCase."""
    yield from (node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        yield from (n for n in names if n[0].isupper() and any(c.islower() for c in n))
