"""The embedded demo: train a base and its experts on real data, merge them with every method, compare.

Its steps: `data` and `tasks` -> `train.pretrain` -> `heads` -> `train.finetune` -> `merging` -> `results`.
"""

from __future__ import annotations

from actmat.extras.demo.results import DemoResult
from actmat.extras.demo.run import DemoSettings, run_demo

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
