"""The best merge of some experts, found from a few unlabelled inputs of each."""

from __future__ import annotations

from actmat.tune.evaluate import Trial
from actmat.tune.report import Rival, TuneReport
from actmat.tune.space import Candidate, Space, load_space, make_space
from actmat.tune.tuning import TuneProgress, TuneSettings, tune_recipe

__all__ = [
    "Candidate",
    "Rival",
    "Space",
    "Trial",
    "TuneProgress",
    "TuneReport",
    "TuneSettings",
    "load_space",
    "make_space",
    "tune_recipe",
]
