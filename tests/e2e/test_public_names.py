"""What `import actmat` offers, in a fresh interpreter, in any order of use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import actmat

SOURCE = str(Path(__file__).parents[2] / "src")


def run(code: str) -> str:
    program = f"import sys; sys.path.insert(0, {SOURCE!r})\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("before", ["actmat.merge", "import actmat.plan"])
def test_plan_is_the_function_whatever_was_imported_before(before: str) -> None:
    """A subpackage has that name too, and importing one sets an attribute of its parent."""
    found = run(f"import actmat\n{before}\nfrom actmat.plan import MergePlan\nprint(actmat.plan.__module__)")
    assert found == "actmat.api.merging"


def test_every_public_name_is_there_and_importing_is_light() -> None:
    code = "import actmat; print('torch' in sys.modules, [n for n in actmat.__all__ if not hasattr(actmat, n)])"
    assert run(code) == "False []"


def test_every_error_is_public() -> None:
    from actmat import errors

    tree = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    assert len(tree) == 7
    assert {n for n in tree if getattr(actmat, n) is getattr(errors, n)} == tree


def test_completion_shows_the_public_names() -> None:
    assert run("import actmat; print(dir(actmat) == sorted(actmat.__all__), 'merge' in dir(actmat))") == "True True"
    assert run("import actmat.plan; print(dir(actmat) == sorted(actmat.__all__))") == "True"
    found = run("from actmat import *; print(merge.__module__, MergeError.__module__)")
    assert found == "actmat.api.merging actmat.errors"
