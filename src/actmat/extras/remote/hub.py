"""One commit of a model repository on the Hugging Face hub: its files, pinned, and the cached ones among them.

Opening a checkpoint lists the files and reads the header of every safetensors shard with at most two small requests,
so that a merge can be planned before a weight is downloaded. After that a shard is downloaded into the hub's
cache when a tensor of it is first read, or, if the repository was named by its URL (`hf://`), read by ranges and not
cached. Torch files have no header: they are downloaded when they are opened.

Everything goes through `huggingface_hub`: its endpoint, token, cache, offline switch and HTTP client. The revision is
pinned to a commit before anything else, so that all files are of one commit.

With `HF_HUB_OFFLINE=1` the commit and the files come from the cache only. Without it an unreachable hub is an error:
the cached commit of a branch may be an old one, and using it must be the user's decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    errors,
    get_session,
    hf_hub_url,
    set_client_factory,
    try_to_load_from_cache,
)
from huggingface_hub.utils import _http, build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from actmat.checkpoints.folder import member
from actmat.checkpoints.side_files import SideFiles, side_files_in
from actmat.errors import CheckpointError, MergeError, is_memory_error
from actmat.extras.remote import claims
from actmat.extras.remote.files import RemoteFiles
from actmat.extras.remote.retry import FIRST_RANGE, TIMEOUT, TransientError, first_line, ranged, read_body, retried

NO_PATH = "no local path of this name, and "
HTTP_ERROR: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # of whichever httpx the hub library uses

REFUSALS: dict[type[Exception], str] = {
    errors.GatedRepoError: "the hub repository is gated. Fix: accept its terms on its page, then log in (hf auth login "
    "or HF_TOKEN).",
    errors.RevisionNotFoundError: "the hub repository has no such revision. Fix: give a branch, tag or commit that it "
    "has.",
    errors.RepositoryNotFoundError: "not a local path, and not on the hub, or private there. Fix: correct "
    "the name, or log in (hf auth login or HF_TOKEN).",
    errors.OfflineModeIsEnabled: "offline (HF_HUB_OFFLINE) and not in the cache. Fix: go online.",
}
"""Errors of the hub library -> cause and fix. The first that matches counts: a gated repository is also not found."""


@dataclass(eq=False)
class HubRepository(RemoteFiles):
    """One pinned commit.

    `commit` is the full hash; `files` maps names to the files in and below the top folder, or the subfolder `folder`,
    which ends in a slash.
    """

    repo_id: str
    location: str
    commit: str
    files: Mapping[str, claims.RemoteFile]
    cache_dir: Path
    streams: bool = False
    folder: str = ""
    named: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.hub_id, self.home = self.repo_id, f"{self.repo_id}/{self.folder}"
        self.names = sorted(name for name in self.files if "/" not in name)
        self._versions: dict[str, str] = {}

    @property
    def address(self) -> str:
        """Hub id with the commit."""
        return f"hf://{self.repo_id}@{self.commit}"

    @cached_property
    def directory(self) -> Path | None:
        """Folder of `config.json` in the cache, downloaded first; None without it in the commit, or for a file."""
        return self.fetch("config.json").parent if self.named is None and "config.json" in self.files else None

    def local(self, name: str) -> Path | None:
        """Path of the file in the cache, or None."""
        path = self.folder + name
        path_in_cache = try_to_load_from_cache(self.repo_id, path, cache_dir=self.cache_dir, revision=self.commit)
        return Path(path_in_cache) if isinstance(path_in_cache, str) else None

    def fetch(self, name: str) -> Path:
        """Path of the file in the cache, downloaded first if it is not there."""
        cached, path = self.local(name) is not None, self.folder + name
        with explained(self.location, library=True):
            path_in_cache = Path(
                hub_api().hf_hub_download(self.repo_id, path, revision=self.commit, cache_dir=self.cache_dir)
            )
        where = f"{self.location}: {name}"
        snapshot = Path(str(path_in_cache).removesuffix(str(Path(path))))
        claims.check_commit(where, snapshot.name, self.commit)
        if not cached:
            try:
                claims.check_download(where, path_in_cache, self.files[name])
            except CheckpointError:  # the next run must not find it in the cache
                for left in {path_in_cache.resolve(), path_in_cache}:
                    left.unlink(missing_ok=True)
                raise
        return member(snapshot, path)

    def file(self, name: str) -> claims.RemoteFile:
        """A file of the commit."""
        return self.files[name]

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a file of the commit, with retries."""
        if length == 0:
            return b""
        with explained(self.location):
            return retried(lambda: self._range(name, offset, length), f"{self.location}: {name}")

    def child(self, name: str) -> HubRepository | None:
        """A folder of the commit."""
        start = f"{name}/"
        inside = {
            n.removeprefix(start): claims.RemoteFile(n.removeprefix(start), f.size, f.etag)
            for n, f in self.files.items()
            if n.startswith(start)
        }
        folder = f"{self.folder}{start}"
        return replace(self, location=f"{self.location}/{name}", files=inside, folder=folder) if inside else None

    def only(self, name: str) -> HubRepository:
        """The same files with `name` as the named one, downloaded when it is first read: for adapters, read often.

        A file that one request would read whole is downloaded at once. The location names the commit, so that another
        process opens the same file.
        """
        if self.files[name].size <= FIRST_RANGE:
            self.fetch(name)
        return replace(self, location=f"{self.repo_id}@{self.commit}", streams=False, named=name)

    def whole(self) -> HubRepository:
        """The commit itself: users name no files in it."""
        return self

    def side_files(self, merged: Sequence[str]) -> SideFiles:
        """Files of the commit."""
        return side_files_in({f.name: f.size for f in self.files.values()}, merged, self.fetch)

    def _range(self, name: str, offset: int, length: int) -> bytes:
        url = hf_hub_url(self.repo_id, self.folder + name, revision=self.commit, endpoint=constants.ENDPOINT)
        with ranged(url, offset, length, build_hf_headers()) as response:
            hf_raise_for_status(response)
            if response.status_code != 206 and offset > 0:
                raise CheckpointError(f"{self.location}: the hub ignored a range request for {name}; download it first")
            what, file = f"{self.location}: {name}", self.files[name]
            version = claims.stated_version(what, file, self.commit, [*response.history, response])
            if self._versions.setdefault(name, version) != version:
                raise claims.changed(what, f"version {self._versions[name]}, now {version}")
            whole = response.status_code != 206  # the start of it is read
            if not whole and (total := claims.stated_total(what, response.headers, offset, length)) != file.size:
                raise CheckpointError(
                    f"{what} is not what the hub announced: it has {total} bytes, expected {file.size} at commit "
                    f"{self.commit}. Fix: run again."
                )
            return read_body(response, length)


def open_repository(repo_id: str, revision: str | None, *, streams: bool = False) -> HubRepository:
    """Pin the revision (default `main`) and list its files, from the hub or, offline, from the cache.

    Args:
        streams: read tensors by ranges; else shards are downloaded when they are first read.

    Raises:
        CheckpointError: not found, no access, or offline and not in the cache.
    """
    location = repo_id if revision is None else f"{repo_id}@{revision}"
    wanted = revision or constants.DEFAULT_REVISION
    if ".." in wanted:
        raise CheckpointError(f"{location}: '{wanted}' is not a revision")
    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    home = cache / f"models--{repo_id.replace('/', '--')}"
    if constants.is_offline_mode():
        commit = _cached_commit(home, wanted, location)
        return HubRepository(repo_id, location, commit, _cached_files(home / "snapshots" / commit), cache, streams)
    with explained(location, NO_PATH, library=True):
        info = hub_api().model_info(repo_id, revision=wanted, files_metadata=True, timeout=TIMEOUT)
        commit = claims.check_commit(location, info.sha, wanted)
        versions = ((s.lfs.sha256 if s.lfs else s.blob_id) or commit for s in info.siblings or ())
        rows = zip(info.siblings or (), versions, strict=True)
        files = claims.stated_files(location, ((s.rfilename, s.size or 0, version) for s, version in rows))
    _remember_commit(home, wanted, commit)
    notes = claims.odd_names_note(s.rfilename for s in info.siblings or ())
    return HubRepository(repo_id, location, commit, files, cache, streams, notes=notes)


def hub_api() -> HfApi:
    """The hub library, whose answers are checked before it makes paths of them."""
    client = get_session()
    if claims.check_headers not in client.event_hooks["response"]:
        made: Callable[[], Any] = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)

        def checked() -> Any:  # also after a lost connection, for which the library makes another client
            api = made()
            api.event_hooks["response"].append(claims.check_headers)
            return api

        set_client_factory(checked)
    return HfApi()


def _cached_commit(home: Path, wanted: str, location: str) -> str:
    if (home / "snapshots" / wanted).is_dir():
        return wanted
    reference = home / "refs" / wanted
    if reference.is_file() and (home / "snapshots" / (commit := reference.read_text().strip())).is_dir():
        return claims.check_commit(location, commit)
    cached = sorted(p.name for p in (home / "snapshots").glob("*")) if home.is_dir() else []
    has = f"cached commits: {', '.join(cached[:4])}" if cached else "no commit of it is cached"
    raise CheckpointError(
        f"{location}: {NO_PATH}offline (HF_HUB_OFFLINE), '{wanted}' is not in the hub's cache; {has}. "
        "Fix: correct the path, go online once, or name a cached commit with @."
    )


def _cached_files(snapshot: Path) -> dict[str, claims.RemoteFile]:
    """Files of a snapshot: links to blobs named by their content hash (a copy has the commit as its hash)."""
    files: dict[str, claims.RemoteFile] = {}
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            name = path.relative_to(snapshot).as_posix()
            etag = Path(os.readlink(path)).name if path.is_symlink() else snapshot.name
            files[name] = claims.RemoteFile(name, path.stat().st_size, etag)
    return files


def _remember_commit(home: Path, revision: str, commit: str) -> None:
    """Write the commit of a branch to the cache, as the hub library does, so that offline runs find it."""
    reference = home / "refs" / revision
    with suppress(OSError):  # a read-only cache must not stop the run
        if revision != commit and not (reference.is_file() and reference.read_text() == commit):
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)


@contextmanager
def explained(location: str, lead: str = "", *, library: bool = False) -> Iterator[None]:
    """Turn errors of the hub library into a `CheckpointError` with the cause and the fix.

    Args:
        location: of the repository.
        lead: start of the message if the hub cannot be used.
        library: any other error comes from an answer that the library cannot read.
    """
    try:
        yield
    except tuple(REFUSALS) as error:
        text = next(text for kind, text in REFUSALS.items() if isinstance(error, kind))
        raise CheckpointError(f"{location}: {text}") from error
    except errors.EntryNotFoundError as error:
        offline = constants.is_offline_mode()
        cause = "offline (HF_HUB_OFFLINE) and not in the cache" if offline else "deleted or unreachable"
        raise CheckpointError(f"{location}: a file is {cause}: {first_line(error)}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{location}: not a hub id: {first_line(error)}") from error
    except (HTTP_ERROR, OSError) as error:
        raise CheckpointError(
            f"{location}: {lead}the hub at {constants.ENDPOINT} cannot be used: {type(error).__name__}: "
            f"{first_line(error)}. Fix: correct the path, check the connection, or set HF_HUB_OFFLINE=1 to use "
            "what is cached."
        ) from error
    except Exception as error:  # the library raises errors of many types on what a server answers
        if not library or isinstance(error, MergeError | TransientError) or is_memory_error(error):
            raise
        raise CheckpointError(
            f"{location}: the answer of the hub at {constants.ENDPOINT} cannot be used: {type(error).__name__}: "
            f"{first_line(error)}. {claims.TRUST}"
        ) from error
