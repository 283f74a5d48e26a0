"""See `tests.helpers.family`."""

from __future__ import annotations

from tests.helpers.family import family, place

__all__ = ["family", "place"]
