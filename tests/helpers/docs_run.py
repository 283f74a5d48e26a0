"""Markdown pages as programs: their code blocks, and a runner that executes one page from top to bottom.

Marks stand on the line before a fence:

    <!-- not run: reason -->       the block is not executed
    <!-- file: recipe.yaml -->     the block (of any language) is written to this file

All blocks of a page run in one directory, in order; its python blocks share one interpreter and its variables.
A `console` block gives commands after `$ `; what stands between them is output, shown for the reader.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)")
MARK = re.compile(r"^ *<!-- (?P<kind>not run|file): *(?P<text>.*?) *-->$")
RUN = ("python", "bash", "console")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is the number of its first line of code."""

    language: str
    code: str
    line: int
    not_run: str | None = None
    file: str | None = None


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page.

    Raises:
        ValueError: a fence that is never closed, a mark without text, or a shell block that names its language
            `sh`, `shell` or `py` (it would escape being run).
    """
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if not opening:
            number += 1
            continue
        start, indent, language = number + 1, len(opening["indent"]), opening["language"]
        end = next((i for i in range(start, len(lines)) if lines[i].strip() == "```"), None)
        if end is None:
            raise ValueError(f"line {start}: this block is never closed")
        if language in ("sh", "shell", "zsh", "py", "python3"):
            raise ValueError(f"line {start}: write ```bash, ```console or ```python, not ```{language}")
        mark = MARK.match(lines[number - 1]) if number else None
        if mark and not mark["text"]:
            raise ValueError(f"line {number}: the mark '{mark['kind']}' says nothing after the colon")
        marks = {mark["kind"].replace(" ", "_"): mark["text"]} if mark else {}
        code = "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines[start:end])
        found.append(Block(language, code + "\n", start + 1, **marks))
        number = end + 1
    return found


def commands(code: str) -> str:
    """Shell commands of a console block: what follows `$ `, and `> ` after a line that ends in a backslash."""
    out: list[str] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            out.append(line[2:])
        elif out and out[-1].endswith("\\"):
            out.append(line.removeprefix("> "))
    return "\n".join(out) + "\n"


def steps(page: str) -> list[dict[str, object]]:
    """What there is to do for a page, in order."""
    return [asdict(b) for b in blocks(page) if b.not_run is None and (b.file or b.language in RUN)]


def run_page(name: str, page: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Execute a page in `directory`, with `actmat` and `python` of this tree on the path and no network."""
    tools = directory.parent / f"{directory.name}-bin"
    tools.mkdir()
    _tool(tools / "python", f'exec "{sys.executable}" "$@"')
    call = "import sys; sys.argv[0] = 'actmat'; from actmat.cli.main import main; sys.exit(main())"
    _tool(tools / "actmat", f'exec "{sys.executable}" -c "{call}" "$@"')
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-P", __file__, name],
        input=json.dumps(steps(page)),
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def _tool(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def execute(name: str, todo: list[dict[str, object]]) -> None:
    """Run the steps here and now (in the child process). The first failure ends it, naming page and line."""
    scope: dict[str, object] = {"__name__": "__main__"}
    for step in todo:
        code, line = str(step["code"]), int(str(step["line"]))
        if step["file"]:
            target = Path(str(step["file"]))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(code)
        elif step["language"] == "python":
            exec(compile("\n" * (line - 1) + code, name, "exec"), scope)
        else:
            script = commands(code) if step["language"] == "console" else code
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}:{line}: exit status {done.returncode} of\n{script}")


if __name__ == "__main__":
    sys.path.insert(0, "")  # the page's own directory, not that of this file
    execute(sys.argv[1], json.load(sys.stdin))
