"""actmat: merge fine-tuned models without data.

    import actmat
    actmat.merge(base="base", experts=["math", "code"], method="actmat", out="merged")

Names are imported when they are first used, so that `import actmat` stays fast (torch is loaded by the first merge).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from actmat.version import __version__

if TYPE_CHECKING:
    from actmat.api import MergeReport, diagnose, merge, plan
    from actmat.api.agreement import agreement, residual_on_data
    from actmat.checkpoints.resolve import open_checkpoint
    from actmat.diagnostics.model import Diagnosis
    from actmat.matrices import merge_matrices
    from actmat.report.verify import verify

__all__ = [
    "Diagnosis",
    "MergeReport",
    "__version__",
    "agreement",
    "diagnose",
    "merge",
    "merge_matrices",
    "open_checkpoint",
    "plan",
    "residual_on_data",
    "verify",
]

_HOME = {
    "Diagnosis": "actmat.diagnostics.model",
    "MergeReport": "actmat.run",
    "agreement": "actmat.api.agreement",
    "diagnose": "actmat.api",
    "merge": "actmat.api",
    "merge_matrices": "actmat.matrices",
    "open_checkpoint": "actmat.checkpoints.resolve",
    "plan": "actmat.api",
    "residual_on_data": "actmat.api.agreement",
    "verify": "actmat.report.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'actmat' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


class _Package(ModuleType):
    """The module type of this package: `actmat.plan` is the function, also once the subpackage `plan` is imported.

    Importing a subpackage sets it as an attribute of its parent, which would hide the function of that name.
    `from actmat.plan import ...` does not go through the attribute.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
