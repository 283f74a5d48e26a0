"""Write the output that console blocks show anew, from really running the pages.

    python -m docs.record                        # every page
    python -m docs.record docs/commands/plan.md

Only commands that show output get new output (write any line, such as `?`, to ask for it), at 80 columns. An output
with a `...` line is left alone as long as it still fits.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from docs.markdown import ROOT, pages
from tests.helpers.docs_fixture import write_models
from tests.helpers.docs_run import Run, agrees, blocks, commands, run_page


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


def main() -> None:
    """Command line."""
    os.environ["OMP_NUM_THREADS"] = "1"  # pages run in forks of a process with torch, whose threads do not survive one
    chosen = [Path(p).resolve() for p in sys.argv[1:]] or [p for p in pages() if p.exists()]
    with tempfile.TemporaryDirectory() as temporary:
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
