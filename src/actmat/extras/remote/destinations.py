"""Where outputs at URLs go: buckets, and model repositories of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.bounds import read_object
from actmat.checkpoints.resolve import find_source
from actmat.checkpoints.source import Source
from actmat.checkpoints.writing.shards import Shard
from actmat.checkpoints.writing.staging import MANIFEST_NAME, Staging
from actmat.errors import CheckpointError
from actmat.extras.remote.retry import retried
from actmat.extras.remote.schemes import open_store
from actmat.extras.remote.source import open_remote
from actmat.extras.remote.upload import MARK_NAME, UploadStaging, check_upload_url, clear_upload, staging_folder

__all__ = ["HUB", "OBJECTS"]


class _Objects:
    """Buckets and servers; see `run.places.Destination`."""

    def claims(self, url: str) -> bool:
        return not url.startswith("hf://")

    def problems(self, url: str) -> list[str]:
        return check_upload_url(url)

    def staging(
        self, url: str, root: str | None, fingerprint: str, shards: Sequence[Shard], overwrite: bool
    ) -> Staging:
        return UploadStaging(url, staging_folder(url, root), fingerprint, shards, overwrite=overwrite)

    def finished(self, url: str) -> Source:
        source = open_remote(url)
        clears = MARK_NAME in source.names and read_object(source.fetch(MARK_NAME)).get("clearing")
        return _with_manifest(source, url, is_whole=not clears)  # while it is replaced, its manifest is the old one

    def sizes(self, url: str) -> dict[str, int]:
        store = open_store(url)
        there = {**retried(lambda: store.list() or {}, url), **retried(store.below, url)}
        return {name: file.size for name, file in there.items()}

    def sweep(self, url: str) -> None:
        store = open_store(url)
        retried(lambda: clear_upload(store), url)


class _Hub:
    """Repositories of the hub; see `run.places.Destination`."""

    def claims(self, url: str) -> bool:
        return url.startswith("hf://")

    def problems(self, url: str) -> list[str]:
        return check_upload_url(url)

    def staging(
        self, url: str, root: str | None, fingerprint: str, shards: Sequence[Shard], overwrite: bool
    ) -> Staging:
        from actmat.extras.remote.hub_upload import HubStaging

        return HubStaging(url, staging_folder(url, root), fingerprint, overwrite=overwrite)

    def finished(self, url: str) -> Source:
        return _with_manifest(find_source(url), url)

    def sizes(self, url: str) -> dict[str, int]:
        from actmat.extras.remote.hub_upload import hub_name, look_up

        return {name: file.size for name, file in look_up(hub_name(url)).files.items()}

    def sweep(self, url: str) -> None:
        """Nothing: an output there is one commit."""


def _with_manifest(source: Source, url: str, *, is_whole: bool = True) -> Source:
    if not is_whole or MANIFEST_NAME not in source.names:
        raise CheckpointError(f"{url} has no {MANIFEST_NAME}")
    return source


OBJECTS, HUB = _Objects(), _Hub()
