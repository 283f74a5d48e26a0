"""The embedded demo: train a base and its experts on real data, merge them with every method, compare.

Its steps: `data` and `tasks` -> `train.pretrain` -> heads -> `train.finetune` -> merging -> `evaluate` -> `results`,
`table`. Heads, schedules, merging and intervals are those of the larger experiments (`experiments.harness`).
"""

from __future__ import annotations

from actmat.demo.results import DemoResult
from actmat.demo.run import run_demo
from actmat.demo.settings import DemoSettings

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
