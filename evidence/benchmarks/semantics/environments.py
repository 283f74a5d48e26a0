"""Virtual environments, each with one version of PEFT, and all else from the environment that runs this.

PEFT 0.17 does not import beside transformers 5: its environment has the last transformers 4 and what that needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common import borrowing_python

TRANSFORMERS_4 = ("transformers<5", "tokenizers>=0.22,<0.23", "huggingface_hub<1")
INSTALLED = "installed"
"""Name of the version of the environment that runs this, before it is asked for its number."""
VERSIONS: dict[str, tuple[str, ...]] = {
    "0.17.1": ("peft==0.17.1", *TRANSFORMERS_4),
    "0.18.1": ("peft==0.18.1",),
    "0.19.0": ("peft==0.19.0",),
    "0.19.1": ("peft==0.19.1",),
    INSTALLED: (),
}
"""Version of PEFT -> what its environment installs."""
_ASK = """
import json, peft, torch, transformers
print(json.dumps({m.__name__: m.__version__ for m in (peft, transformers, torch)}))
"""


def interpreter(folder: Path, version: str) -> str:
    """The interpreter with this version, in an environment below the folder that is made where it is not there."""
    if not VERSIONS[version]:
        return sys.executable
    return borrowing_python(folder / version, VERSIONS[version])


def versions_of(python: str) -> dict[str, str]:
    """Versions of PEFT, transformers and torch that an interpreter imports.

    Raises:
        CalledProcessError: they cannot be imported together.
    """
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
