"""Settings of every test, and a fixture that several share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from evidence.tests.helpers.hub import HubStandIn, served
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # a busy machine stalls at times
settings.load_profile("no deadline")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    """An empty stand-in of the hub at which the hub's library points, with a cache of its own and no token."""
    from huggingface_hub import close_session, constants

    with served() as stand_in:
        template = stand_in.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        close_session()  # a client made before may carry a proxy
        yield stand_in
        close_session()
