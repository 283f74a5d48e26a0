"""One commit of a model repository on the Hugging Face hub: its files, pinned, and what is cached of them.

Everything goes through `huggingface_hub`: its endpoint, token, cache, offline switch and HTTP client. The revision is
pinned to a commit before anything else, so that two files are never of two commits.

With `HF_HUB_OFFLINE=1` the commit and the files come from the cache alone. Without it an unreachable hub is an error:
the cached commit of a branch may be an old one, and using it must be the user's decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from actmat.errors import CheckpointError

__all__ = ["HubFile", "HubRepository", "open_repository"]

FIRST_RANGE = 256 * 1024
"""Bytes asked for first: nearly every safetensors header is shorter."""

TIMEOUT = 30.0
HTTP_ERROR: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # of whichever httpx the hub library uses


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit. `etag` is its content hash: SHA-256 of large files, git blob id of small ones."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class HubRepository:
    """One pinned commit.

    Args:
        repo_id: `org/name`.
        location: what the user called it.
        commit: full commit hash.
        files: name -> file, of the top folder and below.
        cache_dir: cache of the hub library.
    """

    repo_id: str
    location: str
    commit: str
    files: Mapping[str, HubFile]
    cache_dir: Path

    def cached(self, name: str) -> Path | None:
        """Path of the file in the cache, or None."""
        found = try_to_load_from_cache(self.repo_id, name, cache_dir=self.cache_dir, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def fetch(self, name: str) -> Path:
        """Path of the file in the cache, downloaded if it is not there.

        Raises:
            CheckpointError: not cached and not to be had.
        """
        with explained(self.location):
            return Path(HfApi().hf_hub_download(self.repo_id, name, revision=self.commit, cache_dir=self.cache_dir))

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        """`read_at(offset, length)` over HTTP ranges; the first request fetches enough for most headers."""
        start = self._range(name, 0, min(FIRST_RANGE, self.files[name].size))

        def read_at(offset: int, length: int) -> bytes:
            if offset + length <= len(start):
                return start[offset : offset + length]
            return self._range(name, offset, length)

        return read_at

    def _range(self, name: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        url = hf_hub_url(self.repo_id, name, revision=self.commit, endpoint=constants.ENDPOINT)
        headers = {
            **build_hf_headers(),
            "Range": f"bytes={offset}-{offset + length - 1}",
            "Accept-Encoding": "identity",
        }
        out = bytearray()
        with explained(self.location), get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
            hf_raise_for_status(response)
            if response.status_code != 206 and offset > 0:
                raise CheckpointError(f"{self.location}: the hub ignored a range request for {name}; download it first")
            for chunk in response.iter_bytes():  # stop early: a server may send the whole file
                out += chunk
                if len(out) >= length:
                    break
        if len(out) < length:
            raise CheckpointError(f"{self.location}: {name} ended after {offset + len(out)} bytes. Fix: try again.")
        return bytes(out[:length])


def open_repository(repo_id: str, revision: str | None, *, cache_dir: str | Path | None = None) -> HubRepository:
    """Pin the revision (default `main`) and list its files, from the hub or, offline, from the cache.

    Raises:
        CheckpointError: no such repository or revision, no access, unreachable, or offline and not cached.
    """
    location = repo_id if revision is None else f"{repo_id}@{revision}"
    wanted = revision or constants.DEFAULT_REVISION
    if ".." in wanted:
        raise CheckpointError(f"{location}: '{wanted}' is not a revision")
    cache = Path(constants.HF_HUB_CACHE if cache_dir is None else cache_dir).expanduser()
    home = cache / f"models--{repo_id.replace('/', '--')}"
    if constants.is_offline_mode():
        commit = _cached_commit(home, wanted, location)
        return HubRepository(repo_id, location, commit, _cached_files(home / "snapshots" / commit), cache)
    with explained(location):
        info = HfApi().model_info(repo_id, revision=wanted, files_metadata=True, timeout=TIMEOUT)
    if info.sha is None or info.siblings is None:
        raise CheckpointError(f"{location}: expected a commit and its files from the hub, found neither")
    files = {
        s.rfilename: HubFile(s.rfilename, s.size or 0, (s.lfs.sha256 if s.lfs else s.blob_id) or info.sha)
        for s in info.siblings
    }
    _remember_commit(home, wanted, info.sha)
    return HubRepository(repo_id, location, info.sha, files, cache)


def _cached_commit(home: Path, wanted: str, location: str) -> str:
    if (home / "snapshots" / wanted).is_dir():
        return wanted
    reference = home / "refs" / wanted
    if reference.is_file():
        commit = reference.read_text().strip()
        if (home / "snapshots" / commit).is_dir():
            return commit
    cached = sorted(p.name for p in (home / "snapshots").glob("*")) if home.is_dir() else []
    has = f"cached commits: {', '.join(cached[:4])}" if cached else "nothing of it is cached"
    raise CheckpointError(
        f"{location}: offline (HF_HUB_OFFLINE), and '{wanted}' is not in the cache; {has}. "
        "Fix: go online once, or name a cached commit with @."
    )


def _cached_files(snapshot: Path) -> dict[str, HubFile]:
    """Files of a snapshot: links to blobs that are named by their content hash (the commit stands in for copies)."""
    files: dict[str, HubFile] = {}
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            name = path.relative_to(snapshot).as_posix()
            etag = Path(os.readlink(path)).name if path.is_symlink() else snapshot.name
            files[name] = HubFile(name, path.stat().st_size, etag)
    return files


def _remember_commit(home: Path, revision: str, commit: str) -> None:
    """Note the commit of a branch in the cache, as the hub library does, so that offline runs find it."""
    reference = home / "refs" / revision
    with suppress(OSError):  # a read-only cache is no reason to stop
        if revision != commit and not (reference.is_file() and reference.read_text() == commit):
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)


@contextmanager
def explained(location: str) -> Iterator[None]:
    """Turn what the hub library raises into a `CheckpointError` with the cause and the fix."""
    try:
        yield
    except errors.GatedRepoError as error:
        what = "is gated. Fix: accept its terms on its page, then log in (hf auth login or HF_TOKEN)"
        raise CheckpointError(f"{location}: the hub repository {what}.") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{location}: the hub repository has no such revision. Fix: give a branch, tag or commit that it has."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{location}: no local path, and no such repository on the hub, or it is private. Fix: correct the name, "
            "or log in (hf auth login or HF_TOKEN)."
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointError(f"{location}: offline (HF_HUB_OFFLINE) and not in the cache. Fix: go online.") from error
    except errors.EntryNotFoundError as error:
        offline = constants.is_offline_mode()
        cause = "offline (HF_HUB_OFFLINE) and not in the cache" if offline else "gone or out of reach"
        raise CheckpointError(f"{location}: a file is {cause}: {_first_line(error)}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{location}: not a hub id: {_first_line(error)}") from error
    except (HTTP_ERROR, OSError) as error:
        raise CheckpointError(
            f"{location}: the hub at {constants.ENDPOINT} cannot be used: {type(error).__name__}: "
            f"{_first_line(error)}. Fix: check the connection, or set HF_HUB_OFFLINE=1 to use what is cached."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
