"""Virtual environments, each with one version of PEFT, and all else from the environment that runs this.

PEFT 0.17 does not import beside transformers 5: its environment has the last transformers 4 and what that needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

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
    place = folder / version
    python = place / "bin" / "python"
    borrowed = place / sysconfig.get_path("purelib", vars={"base": ""}).lstrip("/") / "zz_borrowed.pth"
    if not borrowed.exists():
        venv.create(place, symlinks=True, with_pip=False)
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        subprocess.run([*install, *VERSIONS[version]], check=True)
        seen = [p for p in sys.path if p.endswith("site-packages")]  # after its own packages, which go before them
        borrowed.write_text("\n".join(seen) + "\n")
    return str(python)


def versions_of(python: str) -> dict[str, str]:
    """Versions of PEFT, transformers and torch that an interpreter imports.

    Raises:
        CalledProcessError: they cannot be imported together.
    """
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
