"""The tutorial runs in a kernel, shows what it is stored with, and what its text claims is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from docs.record import NOTEBOOK, run
from tests.helpers.repository import SOURCES

STORED = nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(map(str, SOURCES)))
        patch.setenv("OMP_NUM_THREADS", "1")
        return run(nbformat.read(NOTEBOOK, as_version=4), tmp_path_factory.mktemp("tutorial"))


def kinds(notebook: Any) -> list[list[str]]:
    """Per cell, the types of its outputs: what two runs have in common."""
    return [
        [",".join(sorted(o.get("data", {}))) or o.output_type for o in cell.get("outputs", [])]
        for cell in notebook.cells
    ]


def accuracies(notebook: Any) -> dict[str, dict[str, float]]:
    text = next(o.text for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == "stdout")
    return {
        line.split()[0]: {n: float(v) for n, v in re.findall(r"(parity|large) (\d\.\d+)", line)}
        for line in text.splitlines()
    }


def test_the_tutorial_shows_what_is_stored(executed: Any) -> None:
    assert kinds(executed) == kinds(STORED), "run python -m docs.record docs/tutorial.ipynb"


def test_its_claims_hold(executed: Any) -> None:
    for notebook in (executed, STORED):
        found = accuracies(notebook)
        assert found.keys() == {"base", "experts/parity", "experts/large", "merged"}
        assert all(found["merged"][task] > found["base"][task] for task in ("parity", "large"))
        assert max(found, key=lambda name: found[name]["parity"]) == "experts/parity"
        assert max(found, key=lambda name: found[name]["large"]) == "experts/large"


def test_it_fits_on_screens_and_names_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert "/tmp" not in text
    assert all(len(line) < 200 for cell in STORED.cells for line in cell.source.splitlines())


def test_the_first_cell_installs_actmat_only_where_it_is_missing(tmp_path: Path) -> None:
    """As on Colab; pip is replaced, and actmat is hidden by its name."""
    first = next(c for c in STORED.cells if c.cell_type == "code")
    assert first.source.startswith('import importlib.util\n\nif importlib.util.find_spec("actmat") is None:\n    %pip ')
    heard = (
        "from IPython.core.magic import register_line_magic as magic\n@magic\ndef pip(line):\n    print('pip', line)"
    )
    cells = [nbformat.v4.new_code_cell(s) for s in (heard, first.source, first.source.replace('"actmat"', '"missing"'))]
    done = run(nbformat.v4.new_notebook(cells=cells), tmp_path)
    assert [[o.text for o in c.outputs] for c in done.cells] == [[], [], ['pip install --quiet "actmat[demo]"\n']]
