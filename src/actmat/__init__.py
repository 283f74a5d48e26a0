"""actmat: merge fine-tuned models without data.

    import actmat
    actmat.merge(base="base", experts=["math", "code"], method="actmat", out="merged")

Names are imported when they are first used, so that `import actmat` stays fast (torch is loaded by the first merge).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from actmat.version import __version__

if TYPE_CHECKING:
    from actmat.api import MergeReport, merge, merge_matrices, plan
    from actmat.checkpoints.resolve import open_checkpoint
    from actmat.report.verify import verify

__all__ = ["MergeReport", "__version__", "merge", "merge_matrices", "open_checkpoint", "plan", "verify"]

_HOME = {
    "MergeReport": "actmat.api",
    "merge": "actmat.api",
    "merge_matrices": "actmat.api",
    "open_checkpoint": "actmat.checkpoints.resolve",
    "plan": "actmat.api",
    "verify": "actmat.report.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'actmat' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
