"""actmat: merge fine-tuned models of one base into one model, from their weights only or by a few inputs of each.

    import actmat
    experts = {"math": "org/math", "code": "org/code"}  # folders, hub ids, files, modules, adapters
    actmat.merge("org/base", experts, method="ties", out="merged")
    actmat.merge("org/base", experts, data={"math": "What is 2 + 2?", "code": "def f(x):"}, out="by-inputs").answers

`plan` says what a merge would do and `diagnose` what it does to every layer; `verify` compares an output with its
manifest, `agreement` its answers with the experts'; `tune` searches methods and scales; `push` publishes. Errors are
`MergeError`. Names are imported when they are first used: torch is loaded by the first merge.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from actmat.version import __version__ as __version__

if TYPE_CHECKING:
    from actmat.api.diagnosing import diagnose as diagnose
    from actmat.api.exporting import export as export
    from actmat.api.extracting import extract as extract
    from actmat.api.held import merge_adapters as merge_adapters
    from actmat.api.matrices import merge_matrices as merge_matrices
    from actmat.api.measuring import agreement as agreement
    from actmat.api.measuring import residual_on_data as residual_on_data
    from actmat.api.measuring import staged_statistics as staged_statistics
    from actmat.api.merging import average as average
    from actmat.api.merging import merge as merge
    from actmat.api.merging import plan as plan
    from actmat.api.pushing import PushReport as PushReport
    from actmat.api.pushing import push as push
    from actmat.api.reading import open_model as open_model
    from actmat.api.reading import read_recipe as read_recipe
    from actmat.api.tuning import tune as tune
    from actmat.api.tuning import tune_scale as tune_scale
    from actmat.api.verifying import verify as verify
    from actmat.diagnostics.model import Diagnosis as Diagnosis
    from actmat.errors import AlignmentError as AlignmentError
    from actmat.errors import CheckpointError as CheckpointError
    from actmat.errors import MergeError as MergeError
    from actmat.errors import NumericalError as NumericalError
    from actmat.errors import OutputError as OutputError
    from actmat.errors import RecipeError as RecipeError
    from actmat.errors import StatisticsError as StatisticsError
    from actmat.extras.models.in_memory import MemoryMerge as MemoryMerge
    from actmat.run import MergeReport as MergeReport

_NAMES = {
    "actmat.api.diagnosing": "diagnose",
    "actmat.api.exporting": "export",
    "actmat.api.extracting": "extract",
    "actmat.api.held": "merge_adapters",
    "actmat.api.matrices": "merge_matrices",
    "actmat.api.measuring": "agreement residual_on_data staged_statistics",
    "actmat.api.merging": "average merge plan",
    "actmat.api.pushing": "PushReport push",
    "actmat.api.reading": "open_model read_recipe",
    "actmat.api.tuning": "tune tune_scale",
    "actmat.api.verifying": "verify",
    "actmat.diagnostics.model": "Diagnosis",
    "actmat.errors": "AlignmentError CheckpointError MergeError NumericalError OutputError RecipeError StatisticsError",
    "actmat.extras.models.in_memory": "MemoryMerge",
    "actmat.run": "MergeReport",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'actmat' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
