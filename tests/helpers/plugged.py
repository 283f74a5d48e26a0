"""Plug-ins that exist for one test, without an installed distribution."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from actmat import plugins


def plug(monkeypatch: pytest.MonkeyPatch, group: str, name: str, thing: Any) -> None:
    """Add a plug-in to a group, as an entry point of that name would."""
    before = plugins.entries
    own = SimpleNamespace(name=name, load=lambda: thing, dist=None, module="toy", value="toy")

    def entries(asked: str) -> Mapping[str, Any]:
        return {**before(asked), name: own} if asked == group else before(asked)

    monkeypatch.setattr(plugins, "entries", entries)
