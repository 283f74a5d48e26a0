"""Layers import one way, each only those before it in `LAYERS`, and no two files import each other.

Imports inside functions and under `TYPE_CHECKING` count as well. Every module directly in the package is a layer.
Extras import the layers above them, and one another only as `EXTRAS` says; `api` and `cli` import extras.
"""

from __future__ import annotations

import graphlib
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.helpers.repository import (
    EXPERIMENTS,
    PACKAGE,
    ROOT,
    Import,
    imports_of,
    module_name,
    modules,
    package_name,
    tracked_files,
)

LAYERS = (
    "version",
    "system",
    "foreign",
    "errors",
    "plugins",
    "bounds",
    "flag",
    "linalg",
    "methods",
    "checkpoints",
    "layout",
    "experts",
    "identity",
    "statistics",
    "settings",
    "recipe",
    "planning",
    "progress",
    "engine",
    "diagnostics",
    "report",
    "run",
    "extras",
    "api",
    "__init__",  # names of the functions above, for `import actmat`
    "cli",
    "__main__",
)
EXTRAS: dict[str, set[str]] = {
    "adapters": set(),
    "averaging": set(),
    "bake": set(),
    "collect": {"models"},
    "conformance": set(),
    "demo": set(),
    "diffusion": {"adapters"},
    "gguf": set(),
    "mergekit": set(),
    "models": set(),
    "pages": set(),
    "quantized": set(),
    "ray": set(),
    "remote": set(),
    "research": set(),
    "serving": set(),
    "stack": set(),
    "training": set(),
    "tune": {"collect", "models", "pages"},
    "vocabulary": set(),
}
"""Extra -> the others that it needs."""
PUBLIC = {
    "__init__",
    "api",
    "cli",
    "run",
    "extras.demo",
    "errors",
    "version",
    EXPERIMENTS.name,
}  # what the experiments import anywhere
MATHEMATICS = {"linalg", "methods", "extras.research"}
"""They import torch, the standard library and layers of this package, nothing else."""


def layer_of_file(path: Path) -> str:
    """Layer of a file by its first folder: a name of `LAYERS`, or `extras.NAME`."""
    if path.is_relative_to(EXPERIMENTS):
        return EXPERIMENTS.name
    first, *rest = (p.removesuffix(".py") for p in path.relative_to(PACKAGE).parts)
    return f"extras.{rest[0]}" if first == "extras" else first


def layer_of_import(target: str) -> str | None:
    """Layer of a dotted name, None for a name outside the packages."""
    head, *rest = target.split(".")
    if head == EXPERIMENTS.name:
        return EXPERIMENTS.name
    if head != PACKAGE.name:
        return None
    if rest == ["__version__"]:
        return "version"  # a constant that a record may carry
    if rest and rest[0] == "extras":
        return ".".join(rest[:2])
    return rest[0] if rest and rest[0] in LAYERS else "__init__"


def problem(layer: str, imported: Import) -> str | None:
    """Why a module of `layer` may not import this, or None."""
    target = layer_of_import(imported.target)
    if target is None:
        root = imported.target.split(".")[0]
        checks_options = layer == "methods" and root == "pydantic"
        if layer in MATHEMATICS and root != "torch" and root not in sys.stdlib_module_names and not checks_options:
            return f"{layer} imports only torch and the standard library, not {root}"
        return None
    if target == layer:
        return None
    if layer == EXPERIMENTS.name:
        return None if target in PUBLIC else "core.py alone imports internals"
    if target == EXPERIMENTS.name:
        return f"{PACKAGE.name} does not need the distribution of {EXPERIMENTS.name}"
    name = layer.removeprefix("extras.")
    if layer != name and target.startswith("extras."):
        allowed = target.removeprefix("extras.") in EXTRAS.get(name, set())
        return None if allowed else f"{layer} does not need {target}: add it to EXTRAS, or move what both need"
    above, below = (LAYERS.index(n.partition(".")[0]) for n in (layer, target))
    return f"{layer} lies below {target}" if below > above else None


def file_graph(sources: Mapping[str, tuple[str, str]]) -> dict[str, set[str]]:
    """Module -> modules of the same packages that it imports.

    Args:
        sources: module -> (its package, its source).
    """
    graph: dict[str, set[str]] = {}
    for name, (package, source) in sources.items():
        targets = graph.setdefault(name, set())
        for imported in imports_of(source, package):
            target = imported.target
            while target and target not in sources:  # a name in a module
                target = target.rpartition(".")[0]
            targets |= {target} - {"", name}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """One cycle after another, each without the imports that close the ones before it."""
    left = {name: set(targets) for name, targets in graph.items()}
    found = []
    while True:
        try:
            graphlib.TopologicalSorter(left).prepare()
        except graphlib.CycleError as error:
            cycle = error.args[1][::-1]  # each imports the next
            found.append(" -> ".join(cycle))
            left[cycle[0]].discard(cycle[1])
        else:
            return found


def test_every_module_belongs_to_a_layer() -> None:
    """None is lumped with others: a loose module of the package is a layer of its own."""
    known = {*LAYERS, *(f"extras.{name}" for name in EXTRAS)} - {"extras"}
    found = {layer_of_file(path) for path in modules(PACKAGE)} - {"extras.__init__"}
    assert found == known, "a layer or an extra is new, or gone; change LAYERS or EXTRAS, and CONTRIBUTING.md"


def test_imports_go_down_only() -> None:
    """But for `core.py`, the one file for what is not public."""
    found = [
        f"{path.relative_to(ROOT)}:{imported.line}: {why} ({imported.target})"
        for path in modules()
        for imported in imports_of(path.read_text(), package_name(path))
        if path != EXPERIMENTS / "core.py" and (why := problem(layer_of_file(path), imported))
    ]
    assert found == []


EVIDENCE = {"evidence", "benchmarks", EXPERIMENTS.name}
"""Roots of what evidence holds."""


def test_evidence_and_the_rest_of_the_repository_do_not_import_each_other() -> None:
    """But for actmat itself, which evidence may import."""
    for path in (p for p in tracked_files() if p.suffix == ".py"):
        roots = {i.target.split(".")[0] for i in imports_of(path.read_text(), "")}
        is_evidence = path.is_relative_to(ROOT / "evidence")
        wrong = roots & ({"tests", "docs", "chaos", "fuzz"} if is_evidence else EVIDENCE)
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}"


def test_no_import_cycles() -> None:
    found = cycles(file_graph({module_name(p): (package_name(p), p.read_text()) for p in modules()}))
    assert not found, "files import each other:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("methods", "from actmat.checkpoints.base import Checkpoint"),
        ("methods", "def f():\n    import actmat.engine.local"),
        ("methods", "import numpy as np"),
        ("linalg", "from actmat.methods import METHODS"),
        ("planning", "from ..engine import local"),
        ("planning", "from ..progress import Progress"),
        ("planning", "from actmat import cli"),
        ("run", "def f():\n    from actmat.extras.collect.models import load_tensors"),
        ("recipe", "from actmat.extras import mergekit"),
        ("extras.gguf", "from actmat.extras.pages import html"),
        ("extras.tune", "from actmat.cli import screen"),
        ("extras.demo", "from actmat import merge"),
        ("report", "from actmat import merge"),
        ("cli", "def f():\n    from actmat_experiments import suites"),
        ("actmat_experiments", "from actmat.engine.resources import one_thread"),
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
        ("engine", "from actmat.experts.base import Expert\nfrom actmat.progress import Progress"),
        ("report", "from actmat import __version__"),
        ("extras.demo", "import sklearn\nfrom actmat.run import run_recipes"),
        ("extras.tune", "from actmat.run import run_recipes\nfrom actmat.extras.pages import html"),
        ("cli", "from actmat.api import merging\nfrom actmat.extras.tune import report"),
        ("actmat_experiments", "from actmat.cli import screen\nfrom actmat_experiments import suites"),
    ],
)
def test_a_right_import_passes(layer: str, source: str) -> None:
    assert not [problem(layer, i) for i in imports_of(source, f"actmat.{layer}") if problem(layer, i)]


def test_cycles_are_seen() -> None:
    sources = {
        "p": ("p", "from p.a import x"),
        "p.a": ("p", "import torch\ndef f():\n    from p.b import y"),
        "p.b": ("p", "from .c import z"),
        "p.c": ("p", "from p import a"),
        "p.d": ("p", "from p.c import z"),
    }
    graph = file_graph(sources)
    assert graph == {"p": {"p.a"}, "p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}, "p.d": {"p.c"}}
    (found,) = cycles(graph)
    assert found in ("p.a -> p.b -> p.c -> p.a", "p.b -> p.c -> p.a -> p.b", "p.c -> p.a -> p.b -> p.c")
    assert cycles(file_graph({**sources, "p.c": ("p", "from p import x")})), "also through the package itself"
    assert cycles(file_graph({**sources, "p.c": ("p", "")})) == []
