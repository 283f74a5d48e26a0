"""Run units in a Ray cluster: actors with a session each, which write their ranges of the shards to shared storage.

The plan goes to every worker once, through the object store; units are sent in batches, records and findings come back.
Workers send no tensors except to the storage.
"""

from __future__ import annotations

from actmat.extras.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
