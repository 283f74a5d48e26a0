"""What `import actmat` offers, in a fresh interpreter, in any order of use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import actmat

SOURCE = str(Path(__file__).parents[2] / "src")


def run(code: str) -> str:
    program = f"import sys; sys.path.insert(0, {SOURCE!r})\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_plan_is_the_function_whatever_was_imported_before() -> None:
    """A subpackage has that name too, and importing one sets an attribute of its parent."""
    found = run("import actmat, actmat.plan; print(dir(actmat) == sorted(actmat.__all__), actmat.plan.__module__)")
    assert found == "True actmat.api.merging"


def test_names_are_complete_and_importing_is_light() -> None:
    found = run(
        "import actmat; print('torch' in sys.modules, dir(actmat) == sorted(actmat.__all__))\n"
        "print([n for n in actmat.__all__ if not hasattr(actmat, n)], actmat.plan.__module__)\n"
        "from actmat import *; print(merge.__module__, MergeError.__module__)"
    )
    assert found.split("\n") == ["False True", "[] actmat.api.merging", "actmat.api.merging actmat.errors"]


def test_every_error_is_public() -> None:
    from actmat import errors

    tree = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    assert len(tree) == 7
    assert {n for n in tree if getattr(actmat, n) is getattr(errors, n)} == tree
