"""Public originals: files of GitHub repositories at a commit, as they are or in one archive."""

from __future__ import annotations

import http.client
import io
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from actmat.errors import CheckpointError

RAW = "https://raw.githubusercontent.com/{repo}/{commit}/{path}"
ARCHIVE = "https://codeload.github.com/{repo}/tar.gz/{commit}"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Original:
    """A repository at a commit.

    Args:
        mirror: address of another server with `REPO/COMMIT/PATH` and `REPO/tar.gz/COMMIT`; default: GitHub.
    """

    repo: str
    commit: str
    mirror: str = ""

    def file(self, path: str) -> bytes:
        """One file.

        Raises:
            CheckpointError: it cannot be had.
        """
        where = f"{self.mirror}/{{repo}}/{{commit}}/{{path}}" if self.mirror else RAW
        return _download(where.format(repo=self.repo, commit=self.commit, path=quote(path)))

    def files(self, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        """Path -> content of all wanted files, sorted by path, from the archive of the repository.

        Raises:
            CheckpointError: the archive cannot be had or read.
        """
        where = f"{self.mirror}/{{repo}}/tar.gz/{{commit}}" if self.mirror else ARCHIVE
        address = where.format(repo=self.repo, commit=self.commit)
        found = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(_download(address)), mode="r|gz") as archive:
                for member in archive:
                    path = member.name.partition("/")[2]
                    if member.isfile() and wanted(path) and (stream := archive.extractfile(member)) is not None:
                        found[path] = stream.read()
        except (tarfile.TarError, EOFError, OSError) as error:
            raise CheckpointError(f"{address} is no whole archive: {error}. Try again.") from error
        return dict(sorted(found.items()))


def _download(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise CheckpointError(
            f"{address} could not be read: {error}. Check the network; if the repository is gone, another copy of it "
            "at this commit serves as well (--mirror)."
        ) from error
    return content
