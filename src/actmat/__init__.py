"""actmat: merge fine-tuned models without data.

    import actmat
    actmat.merge(base="base", experts=["math", "code"], method="actmat", out="merged")

Names are imported when they are first used, so that `import actmat` stays fast (torch is loaded by the first merge).
Plug-ins add names by the entry points `actmat.api`, as the extras of this distribution do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from actmat.version import __version__ as __version__

if TYPE_CHECKING:
    from actmat.api import MergeReport as MergeReport
    from actmat.api.diagnosing import diagnose as diagnose
    from actmat.api.extracting import ExtractReport as ExtractReport
    from actmat.api.extracting import extract as extract
    from actmat.api.merging import merge as merge
    from actmat.api.merging import plan as plan
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
    from actmat.extras.averaging.api import average as average
    from actmat.extras.collect.on_data import agreement as agreement
    from actmat.extras.collect.on_data import residual_on_data as residual_on_data
    from actmat.extras.collect.staged import staged_statistics as staged_statistics
    from actmat.extras.models.in_memory import MemoryMerge as MemoryMerge
    from actmat.extras.models.in_memory import merge_in_memory as merge_in_memory
    from actmat.extras.research.matrices import merge_matrices as merge_matrices
    from actmat.extras.training.exporting import export as export
    from actmat.extras.tune.tuning import tune as tune
    from actmat.extras.tune.tuning import tune_scale as tune_scale
    from actmat.report.verify import verify as verify

_NAMES = {
    "actmat.api": ("MergeReport",),
    "actmat.api.merging": ("merge", "plan"),
    "actmat.api.diagnosing": ("diagnose",),
    "actmat.api.extracting": ("ExtractReport", "extract"),
    "actmat.api.pushing": ("PushReport", "push"),
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
    "actmat.report.verify": ("verify",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name != "__all__" and name.startswith("_"):  # asked for by `import` and by tools: no plug-in has such a name
        raise AttributeError(f"module 'actmat' has no attribute '{name}'")
    plugins = importlib.import_module("actmat.plugins")
    if name == "__all__":
        return ["__version__", *_HOME, *plugins.entries("actmat.api")]
    if (found := plugins.load("actmat.api", name)) is not None:
        return found
    raise AttributeError(f"module 'actmat' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))
