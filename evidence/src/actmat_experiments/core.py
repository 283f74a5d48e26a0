"""Names of actmat that the experiments use in addition to its public names, its errors, the demo and the terminal."""

from __future__ import annotations

from actmat.checkpoints.memory import tensor_specs
from actmat.checkpoints.model import Model
from actmat.engine.devices import check_device
from actmat.engine.resources import one_thread
from actmat.extras.collect.collect import collect
from actmat.extras.collect.data import SELF, DataOptions
from actmat.extras.collect.on_data import output_energy
from actmat.extras.models.loading import Loaded
from actmat.extras.research.adamerging import AdamState, adam_step, entropy
from actmat.extras.tune.written import MOST, write_prompts
from actmat.foreign import in_one_line
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import TensorLayout
from actmat.methods import MergeMethod, all_methods, get_method
from actmat.recipe import make_recipe
from actmat.run.adapters import modules_differ, size_and_overlap
from actmat.run.locate import locate_inputs
from actmat.settings import RunSettings
from actmat.statistics import Statistics, open_statistics

__all__ = [
    "MOST",
    "SELF",
    "AdamState",
    "DataOptions",
    "Loaded",
    "MergeMethod",
    "Model",
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
    "locate_inputs",
    "make_recipe",
    "modules_differ",
    "one_thread",
    "open_statistics",
    "output_energy",
    "resolve_layout",
    "size_and_overlap",
    "tensor_specs",
    "write_prompts",
]
