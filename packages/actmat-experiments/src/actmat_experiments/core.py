"""Names of actmat that the experiments use in addition to its public names, its errors, the demo and the terminal."""

from __future__ import annotations

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.memory import tensor_specs
from actmat.engine.devices import check_device
from actmat.engine.resources import one_thread
from actmat.engine.units import plan_units, planned_seconds
from actmat.extras.collect.collect import collect
from actmat.extras.collect.combine import join_statistics
from actmat.extras.collect.data import DataOptions, make_batches
from actmat.extras.collect.outputs import output_energy, output_features
from actmat.extras.models.loading import load_model
from actmat.extras.research.adamerging import AdamState, adam_step, entropy
from actmat.foreign import in_one_line
from actmat.layout import resolve_layout
from actmat.layout.types import TensorLayout
from actmat.linalg.operations import total
from actmat.methods import MergeMethod, all_methods, get_method
from actmat.recipe import Recipe, make_recipe
from actmat.run.open import open_inputs
from actmat.run.prepare import plans_of
from actmat.settings import RunSettings
from actmat.statistics import Statistics, open_statistics
from actmat.statistics.kinds import BLOCK, unpack

__all__ = [
    "BLOCK",
    "AdamState",
    "Checkpoint",
    "DataOptions",
    "MergeMethod",
    "Recipe",
    "RunSettings",
    "Statistics",
    "TensorLayout",
    "adam_step",
    "all_methods",
    "check_device",
    "collect",
    "entropy",
    "get_method",
    "in_one_line",
    "join_statistics",
    "load_model",
    "make_batches",
    "make_recipe",
    "one_thread",
    "open_inputs",
    "open_statistics",
    "output_energy",
    "output_features",
    "plan_units",
    "planned_seconds",
    "plans_of",
    "resolve_layout",
    "tensor_specs",
    "total",
    "unpack",
]
