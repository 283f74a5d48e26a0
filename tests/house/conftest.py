"""Rules that do not hold yet: their tests may fail, with the reason; all others must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

PENDING: dict[str, str] = {
    "test_packages_have_bounded_sizes": "the packages have more lines than they may have",
}
"""Name of a test in this folder -> reason. Empty in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", item.name)
        if item.path.parent == Path(__file__).parent and name in PENDING:
            item.add_marker(pytest.mark.xfail(reason=PENDING[name], strict=False))
