"""A base and two experts on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.merging import Family


@pytest.fixture
def samples(tmp_path: Path) -> Family:
    return Family.make(tmp_path / "family")
