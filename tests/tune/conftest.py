"""See `tests.helpers.family`."""

from tests.helpers.family import family

__all__ = ["family"]
