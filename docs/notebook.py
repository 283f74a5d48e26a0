"""Run the tutorial in a kernel, and keep what it showed.

python -m docs.notebook             # writes docs/tutorial.ipynb anew, with its outputs
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("tutorial.ipynb")
SECONDS = 120


def run(notebook: Any, folder: Path) -> Any:
    """The notebook after all its cells were run in a fresh kernel, in a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient

    environment = {**os.environ, "IPYTHONDIR": str(folder / ".ipython"), "NO_COLOR": "1"}
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel(env=environment):
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
            cell.metadata.pop("execution", None)
    for cell in notebook.cells:
        cell["outputs"] = _joined(cell.get("outputs", [])) if cell.cell_type == "code" else []
        if cell.cell_type != "code":
            del cell["outputs"]
    notebook.metadata.pop("language_info", None)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs of a cell with one text per stream, since a kernel cuts and mixes them at random; bars as they ended."""
    found: list[Any] = []
    streams: dict[str, Any] = {}
    for output in outputs:
        before = streams.setdefault(output.name, output) if output.output_type == "stream" else output
        if before is not output:
            before["text"] += output.text
        else:
            found.append(output)
    for output in found:
        if output.output_type == "stream":
            output["text"] = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    return found


def kinds(notebook: Any) -> list[list[str]]:
    """Per cell, the types of its outputs: what two runs have in common."""
    return [
        [",".join(sorted(o.get("data", {}))) or o.output_type for o in cell.get("outputs", [])]
        for cell in notebook.cells
    ]


def main() -> None:
    """Run the tutorial and write it."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        found = run(nbformat.read(NOTEBOOK, as_version=4), Path(folder))
    NOTEBOOK.write_text(nbformat.writes(found) + "\n", encoding="utf-8")
    print(f"{NOTEBOOK.name}: {len(found.cells)} cells")


if __name__ == "__main__":
    main()
