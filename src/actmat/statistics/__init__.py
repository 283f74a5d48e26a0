"""Statistics of models on data, such as Gram matrices of layer inputs and the diagonal Fisher: files of them.

`collect` and `agreement` run models, `merge_statistics` adds files up; they come in as plug-ins of the group
`actmat.statistics`.
"""

from __future__ import annotations

from typing import Any

from actmat.plugins import load
from actmat.statistics.store import Statistics, open_statistics

__all__ = ["Statistics", "open_statistics"]


def __getattr__(name: str) -> Any:
    found = None if name.startswith("_") else load("actmat.statistics", name)
    if found is None:
        raise AttributeError(f"module 'actmat.statistics' has no attribute '{name}'")
    return found
