"""The store that serves the scheme of a URL."""

from __future__ import annotations

from actmat.errors import CheckpointError, MergeError
from actmat.extras.remote.store import Store

__all__ = ["open_store"]


def open_store(url: str, *, error: type[MergeError] = CheckpointError) -> Store:
    """The store of a folder's URL, which passed `check_url`; makes no request.

    Raises:
        MergeError: an unknown scheme, or its package is not installed; of the type `error`.
    """
    if url.startswith(("http://", "https://")):
        from actmat.extras.remote.http import HttpStore

        return HttpStore(url)
    from actmat.extras.remote.objects import ObjectStore

    return ObjectStore(url, error=error)
