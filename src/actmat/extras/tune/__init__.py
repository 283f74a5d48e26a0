"""The best merge of some experts, found from a few unlabelled inputs of each."""

from __future__ import annotations

from actmat.extras.tune.evaluate import Trial
from actmat.extras.tune.memory import MemoryPlan
from actmat.extras.tune.report import Rival, TuneReport
from actmat.extras.tune.settings import TuneProgress, TuneSettings
from actmat.extras.tune.space import Candidate, Space, load_space, make_space
from actmat.extras.tune.tuning import scale_space, tune_recipe, usual_inputs

__all__ = [
    "Candidate",
    "MemoryPlan",
    "Rival",
    "Space",
    "Trial",
    "TuneProgress",
    "TuneReport",
    "TuneSettings",
    "load_space",
    "make_space",
    "scale_space",
    "tune_recipe",
    "usual_inputs",
]
