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

from actmat.version import __version__ as __version__

if TYPE_CHECKING:
    from actmat.api import MergeReport as MergeReport
    from actmat.api import average as average
    from actmat.api import diagnose as diagnose
    from actmat.api import merge as merge
    from actmat.api import plan as plan
    from actmat.api.extracting import ExtractReport as ExtractReport
    from actmat.api.extracting import extract as extract
    from actmat.api.in_memory import MemoryMerge as MemoryMerge
    from actmat.api.in_memory import merge_in_memory as merge_in_memory
    from actmat.api.parts import FinishReport as FinishReport
    from actmat.api.parts import PartReport as PartReport
    from actmat.api.parts import finish as finish
    from actmat.api.parts import merge_part as merge_part
    from actmat.api.pushing import PushReport as PushReport
    from actmat.api.pushing import push as push
    from actmat.checkpoints.resolve import open_checkpoint as open_checkpoint
    from actmat.diagnostics.model import Diagnosis as Diagnosis
    from actmat.errors import AlignmentError as AlignmentError
    from actmat.errors import CheckpointError as CheckpointError
    from actmat.errors import MergeError as MergeError
    from actmat.errors import NumericalError as NumericalError
    from actmat.errors import OutputError as OutputError
    from actmat.errors import RecipeError as RecipeError
    from actmat.errors import StatisticsError as StatisticsError
    from actmat.extras.collect.on_data import agreement as agreement
    from actmat.extras.collect.on_data import residual_on_data as residual_on_data
    from actmat.extras.collect.staged import staged_statistics as staged_statistics
    from actmat.extras.training.exporting import export as export
    from actmat.extras.tune.tuning import tune as tune
    from actmat.extras.tune.tuning import tune_scale as tune_scale
    from actmat.matrices import merge_matrices as merge_matrices
    from actmat.report.verify import verify as verify

_NAMES = {
    "actmat.api": ("MergeReport", "average", "diagnose", "merge", "plan"),
    "actmat.extras.collect.on_data": ("agreement", "residual_on_data"),
    "actmat.extras.training.exporting": ("export",),
    "actmat.api.in_memory": ("MemoryMerge", "merge_in_memory"),
    "actmat.api.extracting": ("ExtractReport", "extract"),
    "actmat.api.parts": ("FinishReport", "PartReport", "finish", "merge_part"),
    "actmat.api.pushing": ("PushReport", "push"),
    "actmat.extras.collect.staged": ("staged_statistics",),
    "actmat.checkpoints.resolve": ("open_checkpoint",),
    "actmat.diagnostics.model": ("Diagnosis",),
    "actmat.errors": (
        "AlignmentError",
        "CheckpointError",
        "MergeError",
        "NumericalError",
        "OutputError",
        "RecipeError",
        "StatisticsError",
    ),
    "actmat.matrices": ("merge_matrices",),
    "actmat.report.verify": ("verify",),
    "actmat.extras.tune.tuning": ("tune", "tune_scale"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'actmat' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """The module type of this package: `actmat.plan` is the function, also once the subpackage `plan` is imported.

    Importing a subpackage sets it as an attribute of its parent, which would hide the function of that name.
    `from actmat.planning import ...` does not go through the attribute.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
