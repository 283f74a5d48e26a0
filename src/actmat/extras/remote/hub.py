"""Outputs at `hf://org/name`: built locally, committed to a repository of the hub at the end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from actmat.checkpoints.hub_push import check_place, create, hub_name, look_up, plan_push, send
from actmat.checkpoints.remote import Storage
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.shards import Shard
from actmat.checkpoints.writing.staging import JOURNAL_NAME, Staging, disk_errors
from actmat.errors import OutputError


class _Hub(Storage):
    def upload_problems(self, url: str) -> list[str]:
        try:
            hub_name(url)
        except OutputError as error:
            return list(error.problems)
        return []

    def stage(
        self, url: str, folder: Path, fingerprint: str, shards: Sequence[Shard], *, overwrite: bool = False
    ) -> HubStaging:
        return HubStaging(url, folder, fingerprint, overwrite=overwrite)

    def sizes(self, url: str) -> dict[str, int]:
        return {name: file.size for name, file in look_up(hub_name(url)).files.items()}


class HubStaging(Staging):
    """Staging of an output whose final place is a repository of the hub; it is built in a local folder.

    Args:
        url: `hf://org/name`.
        folder: local name of the output; it is built in a sibling of it, and never there.
        fingerprint: of the plan.
        overwrite: replace an output that is there.
    """

    def __init__(self, url: str, folder: Path, fingerprint: str, *, overwrite: bool = False) -> None:
        super().__init__(folder, fingerprint, overwrite=overwrite)
        self.repo_id = hub_name(url)

    @property
    def place(self) -> str:
        """The URL."""
        return f"hf://{self.repo_id}"

    def open(self) -> Journal:
        """Take the local lock, read the local journal, and make the repository, private, if it is not there.

        Raises:
            OutputError: it is public, holds something else, or cannot be made.
        """
        journal = super().open()
        there = look_up(self.repo_id)
        check_place(there, private=True, overwrite=self.overwrite)
        create(there, private=True)
        return journal

    def commit(self) -> None:
        """Send all files in one commit; then remove the local folder."""
        files = [p for p in self.path.rglob("*") if p.is_file()]
        names = [n for p in files if (n := p.relative_to(self.path).as_posix()) != JOURNAL_NAME]
        there = look_up(self.repo_id)
        push = plan_push(there, self.path, names, private=True, overwrite=self.overwrite)
        send(push, "Merge with actmat")
        with disk_errors(self.path):
            assert self._journal is not None
            self._journal.close()
            shutil.rmtree(self.path)
        self.committed = self._gone = True
        self.close()


HUB = _Hub()
