"""A stand-in for the hub, to which outputs are pushed, and what its repositories hold."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from huggingface_hub import constants

GIT = ".gitattributes"
"""The file with which the hub makes a repository."""


class Hub:
    """Repositories `org/NAME` on 127.0.0.1, each for one run; processes that are forked later push there."""

    def __init__(self, root: Path) -> None:
        from tests.helpers.hub import served
        from tests.helpers.hub_uploads import Uploads

        self._stack = contextlib.ExitStack()
        self._served = self._stack.enter_context(served())
        self._served.uploads = Uploads(root / "commits")
        constants.ENDPOINT = self._served.endpoint
        constants.HUGGINGFACE_CO_URL_TEMPLATE = self._served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HF_HUB_CACHE = str(root / "hub-cache")
        constants.HF_HUB_DISABLE_XET = True  # the stand-in speaks Git LFS
        os.environ["HF_TOKEN"] = self._served.uploads.token

    @staticmethod
    def name(place: Path) -> str:
        """Repository of a run."""
        return f"org/{place.name.replace(' ', '-')}"

    def commits(self, place: Path) -> list[dict[str, bytes]]:
        """Files of every commit, the oldest first, without the one that makes the repository."""
        folders = self._served.repositories.get(self.name(place), {}).values()
        return [found for folder in folders if (found := _files(folder))]

    def forget(self, place: Path) -> None:
        """Remove the repository of a run, and all large files, which the hub would keep."""
        self._served.repositories.pop(self.name(place), None)
        self._served.branches.pop((self.name(place), "main"), None)
        assert self._served.uploads is not None
        self._served.uploads.objects.clear()

    def close(self) -> None:
        """End the stand-in."""
        self._stack.close()


def _files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != GIT}
