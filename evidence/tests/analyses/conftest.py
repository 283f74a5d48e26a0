"""A finished demo, made once for all analyses."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence.tests.helpers.analyses import tiny_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    return tiny_demo(tmp_path_factory.mktemp("analyses") / "demo")
