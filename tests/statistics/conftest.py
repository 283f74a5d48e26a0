"""See `tests.helpers.family`."""

from tests.helpers.family import family, place

__all__ = ["family", "place"]
