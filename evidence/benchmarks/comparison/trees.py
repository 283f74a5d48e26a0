"""Two source trees of the project: the working tree, and a revision checked out into a temporary git worktree."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.provenance import REPOSITORY, git

SERVER = Path(__file__).with_name("server.py")


@dataclass(frozen=True)
class Tree:
    """A source tree, of which `src` is used only.

    Args:
        name: `old` or `new`.
        root: folder that holds `src`.
        label: commit, for the record.
    """

    name: str
    root: Path
    label: str

    def environment(self) -> dict[str, str]:
        """Variables with which Python imports this tree's package, whatever is installed or lies in the folder."""
        return {"PYTHONPATH": str(self.root / "src"), "PYTHONSAFEPATH": "1"}

    def check(self) -> None:
        """Raise `RuntimeError` when a child would import the package from another place."""
        code = "import actmat; print(actmat.__file__)"
        environment = os.environ | self.environment()
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=self.root, capture_output=True, text=True, check=True
        )
        if not Path(found.stdout.strip()).is_relative_to(self.root / "src"):
            raise RuntimeError(f"the {self.name} tree is {self.root}, but Python imports {found.stdout.strip()}")


@contextlib.contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[tuple[Tree, Tree]]:
    """The revision in a git worktree below `folder`, which is removed at the end, and the working tree.

    Raises:
        SystemExit: git does not know the revision.
    """
    try:
        commit = git("rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"no revision '{revision}': {error.stderr.strip()}") from None
    changed = "+changes" if git("status", "--porcelain", "--", "src") else ""
    new = Tree("new", REPOSITORY, git("rev-parse", "--short=12", "HEAD") + changed)
    old = Tree("old", folder.resolve() / "revision", commit)
    git("worktree", "add", "--quiet", "--detach", str(old.root), commit)
    try:
        for tree in (old, new):
            tree.check()
        yield old, new
    finally:
        git("worktree", "remove", "--force", str(old.root))


class Server:
    """Runs commands of one tree in `folder`; see `benchmarks.comparison.server`."""

    def __init__(self, tree: Tree, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | tree.environment(),
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, arguments: Sequence[str], output: Path) -> int:
        """Exit status of `actmat ARGUMENTS`; `output` gets what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"arguments": list(arguments), "output": str(output)}), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())
