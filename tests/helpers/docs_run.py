"""Markdown pages as programs: their code blocks, and a runner that executes one page from top to bottom.

Marks stand on the line before a fence:

    <!-- not run: reason -->       the block is not executed
    <!-- file: recipe.yaml -->     the block (of any language) is written to this file

All blocks of a page run in one directory, in order; its python blocks share one interpreter and its variables.
A `console` block gives commands after `$ `, each for a shell of its own; what stands between them is their output (both
streams) at 80 columns, longer lines folded at spaces, compared with what the command really prints, but for times and
hashes. A line `...` stands for any lines. A command without shown output is not compared. `python -m docs.record`
writes the outputs anew.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.helpers.forks import command_in_fork, in_fork
from tests.helpers.repository import SOURCES

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)")
MARK = re.compile(r"^ *<!-- (?P<kind>not run|file): *(?P<text>.*?) *-->$")
RUN = ("python", "bash", "console")
WIDTH = 80
PRELOADED = (
    "transformers.models.llama.modeling_llama", "actmat.api.merging", "actmat.cli.main", "actmat.run.recipes",
    "actmat.extras.pages.html", "rich.progress",
)  # fmt: skip
"""Modules that many pages need, imported once before the forks."""
VARIES = re.compile(r"\b(?:\d+(?:\.\d+)? s\b|[0-9a-f]{32,64}\b|\d{4}-\d\d-\d\dT[\d:+]+)")


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


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a console block and the output that the page shows; `line` counts within the block, from 0."""

    text: str
    shown: tuple[str, ...]
    line: int


def commands(code: str) -> list[Command]:
    """Commands of a console block: what follows `$ `, and `> ` after a line that ends in a backslash."""
    out: list[Command] = []
    text: list[str] = []
    shown: list[str] = []
    start = 0
    for number, line in enumerate(code.splitlines()):
        if line.startswith("$ "):
            if text:
                out.append(Command("\n".join(text), tuple(shown), start))
            text, shown, start = [line[2:]], [], number
        elif text and not shown and text[-1].endswith("\\"):
            text.append(line.removeprefix("> "))
        elif text:
            shown.append(line)
    if text:
        out.append(Command("\n".join(text), tuple(shown), start))
    return out


def agrees(shown: tuple[str, ...], real: list[str]) -> bool:
    """Whether the shown output is the real one, but for what `VARIES` and for lines that a `...` stands for."""
    pattern = [
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(VARIES.sub("#", line.rstrip())) + r"\n"
        for line in _stripped(list(shown))
    ]
    text = "".join(VARIES.sub("#", line.rstrip()) + "\n" for line in _stripped(real))
    return re.fullmatch("".join(pattern), text) is not None


def _stripped(lines: list[str]) -> list[str]:
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def steps(page: str) -> list[dict[str, object]]:
    """What there is to do for a page, in order."""
    return [asdict(b) for b in blocks(page) if b.not_run is None and (b.file or b.language in RUN)]


@dataclass(frozen=True, slots=True)
class Run:
    """What came of running a page: exit status, everything printed, and per console line of the page its output."""

    returncode: int
    log: str
    outputs: dict[int, list[str]]

    def differences(self, page: str) -> list[str]:
        """Shown outputs that are not what the commands printed."""
        found = []
        for block in blocks(page):
            if block.language != "console" or block.not_run is not None:
                continue
            for command in commands(block.code):
                real = self.outputs.get(block.line + command.line, [])
                if command.shown and not agrees(command.shown, real):
                    found.append(f"line {block.line + command.line}: $ {command.text}\n" + "\n".join(real))
        return found


def run_page(name: str, page: str, directory: Path) -> Run:
    """Execute a page in `directory`, with `actmat` and `python` of this tree on the path and no network."""
    tools = directory.parent / f"{directory.name}-bin"
    tools.mkdir()
    _tool(tools / "python", f'exec "{sys.executable}" "$@"')
    call = "import sys; sys.argv[0] = 'actmat'; from actmat.cli.main import main; sys.exit(main())"
    _tool(tools / "actmat", f'exec "{sys.executable}" -c "{call}" "$@"')
    environment = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": str(WIDTH),
        "OMP_NUM_THREADS": "1",
    }
    for module in PRELOADED:
        importlib.import_module(module)
    outputs = tools / "outputs.json"
    done = in_fork(lambda: _child(name, steps(page), directory, environment, outputs))
    found = json.loads(outputs.read_text()) if outputs.exists() else {}
    return Run(done.returncode, done.stdout, {int(line): shown for line, shown in found.items()})


def _tool(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _child(
    name: str, todo: list[dict[str, object]], directory: Path, environment: dict[str, str], outputs: Path
) -> None:
    """Body of the page's process."""
    os.environ.update(environment)
    os.environ.pop("FORCE_COLOR", None)
    os.chdir(directory)
    sys.path[:0] = ["", *map(str, SOURCES)]
    warnings.simplefilter("ignore")  # they are errors in tests
    found: dict[int, list[str]] = {}
    try:
        execute(name, todo, found)
    finally:
        outputs.write_text(json.dumps(found))


def execute(name: str, todo: list[dict[str, object]], outputs: dict[int, list[str]]) -> None:
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
        elif step["language"] == "console":
            _console(name, code, line, outputs)
        else:
            simple = [_simple(row) for row in code.replace("\\\n", " ").splitlines()]
            for work in simple if all(simple) else [code]:
                done = _run(work)
                if done.returncode:
                    sys.exit(f"{name}:{line}: exit status {done.returncode} of\n{code}{done.stdout}")


def _console(name: str, code: str, line: int, outputs: dict[int, list[str]]) -> None:
    for command in commands(code):
        done = _run(_simple(command.text.replace("\\\n", " ")) or command.text)
        rows = [piece for row in done.stdout.splitlines() for piece in _fold(row) or [""]]
        outputs[line + command.line] = _stripped([row.rstrip() for row in rows])
        if done.returncode:
            sys.exit(f"{name}:{line}: exit status {done.returncode} of\n{command.text}\n{done.stdout}")


def _fold(row: str) -> list[str]:
    return textwrap.wrap(row, WIDTH, drop_whitespace=False, break_on_hyphens=False)


def _simple(command: str) -> list[str]:
    """Words of a command of actmat, or of Python with a file, that needs no shell; none for others."""
    plain = re.sub(r" 2> [\w.]+$", "", command)
    simple = re.match(r"actmat |python \w+\.py", plain) and not set(plain) & set("|&;<>$`()*?\n")
    return shlex.split(command) if simple else []


def _run(work: list[str] | str) -> subprocess.CompletedProcess[str]:
    """A simple command in a fork, or a script in a shell."""
    if isinstance(work, list):
        return command_in_fork(work)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", work],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
