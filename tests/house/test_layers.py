"""Layers import one way: each only those before it in `LAYERS`. Function-level imports count as well."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.helpers.repository import EXPERIMENTS, PACKAGE, ROOT, SOURCES, Import, cycles, imports_of, modules

LAYERS = (
    "version",
    "errors",
    "linalg",
    "methods",
    "checkpoints",
    "layout",
    "statistics",
    "recipe",
    "plan",
    "engine",
    "diagnostics",
    "report",
    "api",  # files directly in the package: what `import actmat` offers
    "demo",
    "cli",
)
PUBLIC = {"api", "cli", "demo", "errors", "version", EXPERIMENTS.name}  # what the experiments import anywhere
MATHEMATICS = {"linalg", "methods"}  # torch, the standard library, errors, and one another (linalg first)


def layer_of_file(path: Path) -> str:
    """`src/actmat/plan/x.py` -> plan; `src/actmat/errors.py` -> errors; `src/actmat/__init__.py` -> api."""
    if path.is_relative_to(EXPERIMENTS):
        return EXPERIMENTS.name
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__main__", "cli")
    return first if first in LAYERS or (PACKAGE / first).is_dir() else "api"


def layer_of_import(target: str) -> str | None:
    """Layer of a dotted name, None for a name outside the package."""
    head, *rest = target.split(".")
    if head == EXPERIMENTS.name:
        return EXPERIMENTS.name
    if head != PACKAGE.name:
        return None
    if rest == ["__version__"]:
        return "version"  # a constant that a record may carry
    return rest[0] if rest and (rest[0] in LAYERS or (PACKAGE / rest[0]).is_dir()) else "api"


def problem(layer: str, imported: Import) -> str | None:
    """Why a module of `layer` may not import this, or None."""
    target = layer_of_import(imported.target)
    if target is None:
        root = imported.target.split(".")[0]
        if layer in MATHEMATICS and root != "torch" and root not in sys.stdlib_module_names:
            return f"{layer} imports torch and the standard library alone, not {root}"
        return None
    if target == layer:
        return None
    if layer == EXPERIMENTS.name:
        return (
            None if target in ("api", "cli", "demo", "errors", "version", layer) else "core.py alone imports internals"
        )
    if target == EXPERIMENTS.name:
        return f"{PACKAGE.name} does not need the distribution of {EXPERIMENTS.name}"
    if LAYERS.index(target) > LAYERS.index(layer):
        return f"{layer} lies below {target}"
    if target == "demo" and not imported.inside_function:
        return "a command imports the demo inside the function that needs it"
    return None


def test_every_module_belongs_to_a_layer() -> None:
    unknown = {layer_of_file(path) for path in modules(PACKAGE)} - set(LAYERS)
    assert not unknown, f"no place in the order of layers for {sorted(unknown)}: add it to LAYERS and CONTRIBUTING.md"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    if path == EXPERIMENTS / "core.py":
        pytest.skip("the one place for what is not public")
    (source,) = (s for s in SOURCES if path.is_relative_to(s))
    package = ".".join(path.relative_to(source).parent.parts)
    layer = layer_of_file(path)
    found = [
        f"{path.name}:{imported.line}: {why} ({imported.target})"
        for imported in imports_of(path.read_text(), package)
        if (why := problem(layer, imported))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("methods", "from actmat.checkpoints.base import Checkpoint"),
        ("methods", "def f():\n    import actmat.engine.local"),
        ("methods", "import numpy as np"),
        ("linalg", "from actmat.methods import METHODS"),
        ("plan", "from ..engine import local"),
        ("plan", "from actmat import cli"),
        ("report", "from actmat import merge"),
        ("report", "def f():\n    from actmat.demo import run"),
        ("cli", "def f():\n    from actmat_experiments import suites"),
        ("actmat_experiments", "from actmat.engine.resources import one_thread"),
        ("cli", "from actmat.demo import run"),
    ],
)
def test_a_wrong_import_is_seen(layer: str, source: str) -> None:
    assert any(problem(layer, imported) for imported in imports_of(source, f"actmat.{layer}"))


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("methods", "import math\nimport torch\nfrom torch import Tensor\nfrom actmat.errors import MergeError"),
        ("methods", "from actmat.linalg.lowrank import LowRank\nfrom .contract import Merged"),
        ("checkpoints", "import safetensors\nfrom . import base"),
        ("report", "from actmat import __version__"),
        ("cli", "def run():\n    from actmat.demo import run"),
        ("demo", "import sklearn\nfrom actmat import merge"),
        ("actmat_experiments", "from actmat.cli import screen\nfrom actmat_experiments import suites"),
    ],
)
def test_a_right_import_passes(layer: str, source: str) -> None:
    assert not [problem(layer, i) for i in imports_of(source, f"actmat.{layer}") if problem(layer, i)]


# Cycles between files


def module_name(path: Path) -> str:
    """`src/actmat/plan/x.py` -> actmat.plan.x; a package's `__init__.py` -> the package."""
    (source,) = (s for s in SOURCES if path.is_relative_to(s))
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def graph() -> dict[str, set[str]]:
    """Module -> modules of the same distribution that it imports, inside functions and for types as well."""
    files = {module_name(path): path for path in modules()}
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        targets = {_nearest(imported.target, files) for imported in imports_of(path.read_text(), package)}
        found[name] = {t for t in targets if t is not None and t != name}
    return found


def _nearest(target: str, files: Mapping[str, Path]) -> str | None:
    """The module that a dotted name is, or lies in."""
    while target and target not in files:
        target = target.rpartition(".")[0]
    return target or None


def test_no_two_files_import_one_another() -> None:
    assert cycles(graph()) == []


def test_a_cycle_is_seen() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d", "a"}}) == [["b", "c"], ["d"]]
