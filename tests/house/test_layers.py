"""Layers import one way, each only those before it in `LAYERS`, and no two files import each other.

Imports inside functions and under `TYPE_CHECKING` count as well. Every module directly in the package is a layer.
Extras import the layers above them, and one another only as `EXTRAS` says; `api` and `cli` import extras. Evidence
imports actmat, the experiments what is public of it but for `core.py`; nothing imports evidence.
"""

from __future__ import annotations

import graphlib
import sys
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
    *("version", "system", "foreign", "errors", "plugins", "bounds", "flag", "linalg", "methods", "checkpoints"),
    *("layout", "experts", "identity", "statistics", "settings", "recipe", "planning", "progress", "engine"),
    *("diagnostics", "report", "run", "extras", "api", "__init__", "cli", "__main__"),
)
EXTRAS = {"collect": {"models"}, "diffusion": {"adapters"}, "tune": {"collect", "models", "pages"}}
"""Extra -> the others that it needs; those that are not named need none."""
PUBLIC = {"__init__", "api", "cli", "run", "extras.demo", "errors", "version"}
"""What the experiments import anywhere."""
MATHEMATICS = {"linalg", "methods", "extras.research"}
"""They import torch, the standard library and layers of this package, nothing else."""
EVIDENCE = {"evidence", "benchmarks", EXPERIMENTS.name}
"""Roots of what evidence holds."""


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


def test_every_module_belongs_to_a_layer() -> None:
    layers = {layer_of_file(path).partition(".")[0] for path in modules(PACKAGE)}
    assert layers == {*LAYERS}, "a layer is new, or gone; change LAYERS and CONTRIBUTING.md"


def test_imports_go_down_only() -> None:
    """But for `core.py`, the one file for what is not public."""
    wrong = [
        f"{path.relative_to(ROOT)}:{imported.line}: {why} ({imported.target})"
        for path in modules()
        for imported in imports_of(path.read_text(), package_name(path))
        if path != EXPERIMENTS / "core.py" and (why := problem(layer_of_file(path), imported))
    ]
    assert wrong == []


def test_evidence_and_the_rest_of_the_repository_do_not_import_each_other() -> None:
    """But for actmat itself, which evidence may import."""
    for path in (p for p in tracked_files() if p.suffix == ".py"):
        roots = {i.target.split(".")[0] for i in imports_of(path.read_text(), "")}
        wrong = roots & ({"tests", "docs", "chaos", "fuzz"} if path.is_relative_to(ROOT / "evidence") else EVIDENCE)
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}"


def test_no_import_cycles() -> None:
    sources = {module_name(path): path for path in modules()}
    graph = {}
    for name, path in sources.items():
        targets = (imported.target for imported in imports_of(path.read_text(), package_name(path)))
        named = {target if target in sources else target.rpartition(".")[0] for target in targets}  # or a name in it
        graph[name] = named & sources.keys() - {name}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the cycle


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("methods", "def f():\n    import actmat.engine.local"),
        ("methods", "import numpy as np"),
        ("planning", "from ..engine import local"),
        ("planning", "from actmat import cli"),
        ("run", "def f():\n    from actmat.extras.collect.models import load_tensors"),
        ("extras.gguf", "from actmat.extras.pages import html"),
        ("extras.tune", "from actmat.cli import screen"),
        ("extras.demo", "from actmat import merge"),
        ("cli", "def f():\n    from actmat_experiments import suites"),
        ("actmat_experiments", "from actmat.engine.resources import one_thread"),
    ],
)
def test_a_wrong_import_is_seen(layer: str, source: str) -> None:
    assert any(problem(layer, imported) for imported in imports_of(source, f"actmat.{layer}"))
