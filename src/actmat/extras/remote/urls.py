"""Folders of web servers (read only), buckets, and other fsspec file systems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from actmat.checkpoints.remote import Storage
from actmat.checkpoints.retry import retried
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError, OutputError
from actmat.extras.remote.objects import open_store
from actmat.extras.remote.source import open_remote
from actmat.extras.remote.store import check_url
from actmat.extras.remote.upload import UploadStaging, clear_upload


class _Urls(Storage):
    def open_source(self, url: str, *, pinned: Mapping[str, tuple[int, str]]) -> Source:
        return open_remote(url, pinned=pinned)

    def upload_problems(self, url: str) -> list[str]:
        try:
            checked = check_url(url)
            if checked.startswith(("http://", "https://")):
                return [
                    f"{url} cannot be written: web servers are read only; write to a folder or a bucket, then upload it"
                ]
            open_store(checked, error=OutputError)
        except (CheckpointError, OutputError) as error:
            return list(error.problems)
        return []

    def stage(self, url: str, folder: Path, fingerprint: str, *, overwrite: bool = False) -> UploadStaging:
        return UploadStaging(url, folder, fingerprint, overwrite=overwrite)

    def sizes(self, url: str) -> dict[str, int]:
        store = open_store(check_url(url))
        there = {**retried(lambda: store.list() or {}, url), **retried(store.below, url)}
        return {name: file.size for name, file in there.items()}

    def clear(self, url: str) -> None:
        store = open_store(check_url(url))
        retried(lambda: clear_upload(store), url)


URLS = _Urls()
