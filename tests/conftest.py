"""Settings of every test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # a busy machine stalls at times
settings.load_profile("no deadline")
