"""Write the output that console blocks and the tutorial show anew, from really running them.

    python -m docs.record                        # every page
    python -m docs.record docs/commands/plan.md
    python -m docs.record docs/tutorial.ipynb

Only commands that show output get new output (write any line, such as `?`, to ask for it), at 80 columns. An output
with a `...` line is kept as long as it still fits.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from docs.markdown import ROOT, pages
from tests.helpers.docs_fixture import write_models
from tests.helpers.docs_run import Run, agrees, blocks, commands, run_page

NOTEBOOK = Path(__file__).with_name("tutorial.ipynb")


def run(notebook: Any, folder: Path) -> Any:
    """The notebook after all its cells were run in a fresh kernel, in a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient

    environment = {**os.environ, "IPYTHONDIR": str(folder / ".ipython"), "NO_COLOR": "1"}
    place = {"metadata": {"path": str(folder)}}
    # a kernel cuts and mixes streams at random
    client = NotebookClient(notebook, timeout=120, resources=place, coalesce_streams=True)
    with client.setup_kernel(env=environment):
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
            cell.metadata.pop("execution", None)
    notebook.metadata.pop("language_info", None)
    return notebook


def recorded(page: str, run: Run) -> str:
    """The page with the outputs of a run in place of those it shows, where they disagree."""
    lines = page.splitlines()
    for block in reversed(blocks(page)):
        if block.language != "console" or block.not_run is not None:
            continue
        for command in reversed(commands(block.code)):
            place = block.line + command.line
            real = run.outputs.get(place, [])
            if command.shown and not agrees(command.shown, real):
                first = place - 1 + len(command.text.splitlines())
                indent = lines[place - 1][: len(lines[place - 1]) - len(lines[place - 1].lstrip())]
                lines[first : first + len(command.shown)] = [f"{indent}{line}".rstrip() for line in real]
    return "\n".join(lines) + "\n"


def write_notebook(folder: Path) -> None:
    """Run the tutorial and write it."""
    import nbformat

    found = run(nbformat.read(NOTEBOOK, as_version=4), folder)
    NOTEBOOK.write_text(nbformat.writes(found) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    os.environ["OMP_NUM_THREADS"] = "1"  # pages run in forks of a process with torch, whose threads do not survive one
    chosen = [Path(p).resolve() for p in sys.argv[1:]] or [p for p in pages() if p.exists()]
    with tempfile.TemporaryDirectory() as temporary:
        if NOTEBOOK in chosen:
            chosen.remove(NOTEBOOK)
            write_notebook(Path(temporary))
        models = Path(temporary) / "models"
        write_models(models)
        for number, page in enumerate(chosen):
            before = page.read_text()
            if not any(b.language == "console" for b in blocks(before)):
                continue
            directory = Path(temporary) / str(number)
            shutil.copytree(models, directory)
            run = run_page(page.name, before, directory)
            if run.returncode:
                print(f"{page.relative_to(ROOT)} fails:\n{run.log}")
                continue
            after = recorded(before, run)
            if after != before:
                page.write_text(after)
            print(f"{page.relative_to(ROOT)}: {'written' if after != before else 'up to date'}")


if __name__ == "__main__":
    main()
