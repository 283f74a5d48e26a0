"""Outputs at `hf://org/name`: built locally, committed to a hub repository at the end."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from actmat.checkpoints.remote import Storage
from actmat.checkpoints.writing.journal import Journal
from actmat.errors import OutputError
from actmat.extras.remote.push import check_place, create, hub_name, look_up, plan_push, send
from actmat.extras.remote.upload import RemoteStaging


class _HubStorage(Storage):
    def upload_problems(self, url: str) -> list[str]:
        try:
            hub_name(url)
        except OutputError as error:
            return list(error.problems)
        return []

    def stage(self, url: str, folder: Path, fingerprint: str, *, overwrite: bool = False) -> RemoteStaging:
        return HubStaging(f"hf://{hub_name(url)}", folder, fingerprint, overwrite=overwrite)

    def sizes(self, url: str) -> dict[str, int]:
        return {name: file.size for name, file in look_up(hub_name(url)).files.items()}


class HubStaging(RemoteStaging):
    """Staging of an output in a hub repository."""

    def open(self) -> Journal:
        """Take the local lock, read the local journal, and create the repository, private, if missing.

        Raises:
            OutputError: the repository is public, has other content, or cannot be created.
        """
        journal = super().open()
        there = look_up(hub_name(self.url))
        check_place(there, private=True, overwrite=self.overwrite)
        create(there, private=True)
        return journal

    def send(self, names: Collection[str]) -> None:
        """Send all files in one commit."""
        there = look_up(hub_name(self.url))
        push = plan_push(there, self.path, names, private=True, overwrite=self.overwrite)
        send(push, "Merge with actmat")


HUB = _HubStorage()
