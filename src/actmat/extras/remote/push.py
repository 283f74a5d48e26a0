"""Outputs in a model repository of the Hugging Face hub, written atomically by one commit.

Large files are sent first. The hub stores them by content, so an interrupted push does not send them again. The last
request is the commit, which is refused if the repository changed since it was read. Files that the repository already
has with the same hash are not sent; files that only an earlier output of actmat had are removed by the same commit.

All requests use `huggingface_hub`: its endpoint, token, HTTP client and Xet storage.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, errors

from actmat.bounds import read_object
from actmat.checkpoints.hashing import sha256_file
from actmat.checkpoints.remote import Storage
from actmat.checkpoints.resolve import HUB_ID
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.listed import MANIFEST_NAME, listed_files
from actmat.checkpoints.writing.staging import disk_errors
from actmat.errors import CheckpointError, OutputError
from actmat.extras.remote.claims import RemoteFile
from actmat.extras.remote.files import RemoteOutput
from actmat.extras.remote.hub import HTTP_ERROR, HubRepository, explained, open_repository
from actmat.extras.remote.upload import RemoteStaging
from actmat.foreign import in_one_line

KEPT = frozenset({".gitattributes", ".gitignore"})
"""Files of a repository that are part of git."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")

REFUSED = {
    401: "you are not logged in to the hub. Fix: log in (hf auth login), or set HF_TOKEN.",
    403: "the token has no write permission there. Fix: use a token with write permission, or your own namespace.",
    409: "the repository changed meanwhile. Fix: repeat the command.",
    412: "the repository changed meanwhile. Fix: repeat the command.",
    413: "the hub rejects files of this size. Fix: merge with a smaller --set max_shard_size=SIZE.",
}
"""HTTP status -> cause and fix."""


def hub_name(text: str) -> str:
    """Return `org/name` from `hf://org/name` or `org/name`.

    >>> hub_name("hf://org/name"), hub_name("org/name")
    ('org/name', 'org/name')

    Raises:
        OutputError: the text has another form, such as a revision.
    """
    match = HUB_ID.fullmatch(text.rstrip("/"))
    if match is None or match["revision"]:
        raise OutputError(
            f"{text}: expected a hub repository, org/name or hf://org/name; outputs are written to its main branch."
        )
    return match["repo"]


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Current state of a repository.

    Args:
        repo_id: `org/name`.
        exists: whether it exists; false also for a private one hidden from the token.
        private: whether only its owners can see it.
        head: commit of its main branch; empty if it does not exist.
        files: files of that commit.
        ours: files written by an earlier output of actmat.
        unknown: reason why the hub was not asked; the other fields are then unknown.
    """

    repo_id: str
    exists: bool = False
    private: bool = True
    head: str = ""
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    ours: frozenset[str] = frozenset()
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class PushedFile:
    """A file to push; `same`: the repository already has it."""

    name: str
    size: int
    state: Literal["new", "changed", "same"]


@dataclass(frozen=True, slots=True)
class HubPush:
    """A planned commit: its files, and the files it removes."""

    place: HubPlace
    folder: Path
    files: tuple[PushedFile, ...]
    removed: tuple[str, ...]
    private: bool

    @property
    def nbytes(self) -> int:
        """Size of the files that the repository does not have yet, in bytes."""
        return sum(f.size for f in self.files if f.state != "same")

    @property
    def changes(self) -> bool:
        """False if the repository already has this content."""
        return bool(self.nbytes or self.removed or any(f.state != "same" for f in self.files))


def look_up(repo_id: str, *, needed: bool = True) -> HubPlace:
    """Read the state of a repository, in at most two requests.

    Args:
        repo_id: `org/name`.
        needed: if false, an unreachable hub is not an error (`HubPlace.unknown`).

    Raises:
        OutputError: the hub cannot be reached, or the token is wrong.
    """
    if constants.is_offline_mode():
        if not needed:
            return HubPlace(repo_id, unknown="HF_HUB_OFFLINE is set")
        raise OutputError(
            f"Cannot write to {repo_id} on the hub: HF_HUB_OFFLINE is set. Fix: unset it, on a machine with a network "
            "('actmat push OUT ORG/NAME --dry-run' works without one)."
        )
    try:
        repository = open_repository(repo_id, None)
        with explained(repo_id):
            private = bool(HfApi().model_info(repo_id).private)
    except CheckpointError as error:
        missing = isinstance(error.__cause__, errors.RepositoryNotFoundError)
        if missing and not isinstance(error.__cause__, errors.GatedRepoError):
            return HubPlace(repo_id)
        if not isinstance(error.__cause__, HTTP_ERROR) or _status(error.__cause__) is not None:
            raise OutputError(error.headline, error.problems) from error
        cause = f"{type(error.__cause__).__name__}: {in_one_line(error.__cause__)[:200]}"
        if not needed:
            return HubPlace(repo_id, unknown=cause)
        raise OutputError(
            f"{repo_id}: the hub at {constants.ENDPOINT} cannot be reached: {cause}. Fix: check the connection "
            "('actmat push OUT ORG/NAME --dry-run' works without one)."
        ) from error
    return HubPlace(repo_id, True, private, repository.commit, repository.files, _ours(repository))


def _ours(repository: HubRepository) -> frozenset[str]:
    """File names in the manifest of the existing output."""
    if MANIFEST_NAME not in repository.files:
        return frozenset()
    with contextlib.suppress(CheckpointError):
        return frozenset({MANIFEST_NAME, *listed_files(read_object(repository.fetch(MANIFEST_NAME)))})
    return frozenset({MANIFEST_NAME})


def check_place(place: HubPlace, *, private: bool, overwrite: bool) -> None:
    """Raise for a repository with the wrong visibility or with other content.

    Raises:
        OutputError: lists all problems.
    """
    problems = []
    if place.exists and private and not place.private:
        problems.append("it exists and is public: pass --public to 'actmat push' to write there")
    if place.exists and not private and place.private:
        problems.append("it exists and is private: remove --public, or make it public on its page first")
    content = place.files.keys() - KEPT
    strange = sorted(n for n in content - place.ours if n.endswith(WEIGHTS))
    if strange:
        problems.append(
            f"it has weights that actmat did not write ({', '.join(strange[:3])}): choose another name, or remove "
            "them on its page"
        )
    elif content and not overwrite:
        what = "a finished output" if MANIFEST_NAME in content else "files"
        problems.append(f"it has {what}: choose another name, or pass --overwrite (its history keeps the old files)")
    if problems:
        raise OutputError(f"Nothing is written to {place.repo_id} on the hub.", problems)


def plan_push(place: HubPlace, folder: Path, names: Iterable[str], *, private: bool, overwrite: bool) -> HubPush:
    """Compare local files with the repository; files of equal size are hashed.

    Args:
        place: result of `look_up`.
        folder: folder with the files.
        names: file names relative to the folder.
        private: whether a new repository is private.
        overwrite: replace another output.

    Raises:
        OutputError: see `check_place`; a repository with exactly these files is accepted.
    """
    files = tuple(_compared(folder / name, name, place.files.get(name)) for name in sorted(names))
    removed = tuple(sorted(place.ours & place.files.keys() - {f.name for f in files}))
    push = HubPush(place, folder, files, removed, private)
    check_place(place, private=private, overwrite=overwrite or not push.changes)
    return push


def _compared(path: Path, name: str, stored: RemoteFile | None) -> PushedFile:
    with disk_errors(path):
        size = path.stat().st_size
    if stored is None:
        return PushedFile(name, size, "new")
    same = stored.size == size and stored.etag == (sha256_file(path) if len(stored.etag) == 64 else _blob_id(path))
    return PushedFile(name, size, "same" if same else "changed")


def _blob_id(path: Path) -> str:
    """Git blob id of a file, by which the hub identifies small files."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def create(place: HubPlace, *, private: bool) -> None:
    """Create the repository if missing; fails here if the token has no permission.

    Raises:
        OutputError: it cannot be created.
    """
    if not place.exists:
        with push_errors(place.repo_id):
            HfApi().create_repo(place.repo_id, private=private, exist_ok=True)


def send(push: HubPush, message: str) -> str:
    """Send the files that the repository lacks, then commit; returns the commit's URL, or the current one's.

    Raises:
        OutputError: the hub refused or was unreachable; the repository is unchanged.
    """
    repo_id, head = push.place.repo_id, push.place.head
    create(push.place, private=push.private)
    if not push.place.exists:  # another process may have created it, and pushed, meanwhile
        made = look_up(repo_id)
        check_place(made, private=push.private, overwrite=False)
        head = made.head
    elif not push.changes:
        return f"{constants.ENDPOINT}/{repo_id}/commit/{push.place.head}"
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=f.name, path_or_fileobj=str(push.folder / f.name))
        for f in push.files
        if f.state != "same"
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in push.removed]
    with push_errors(repo_id):
        info = HfApi().create_commit(repo_id, operations, commit_message=message, parent_commit=head or None)
    return str(info.commit_url)


def _status(error: BaseException | None) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


@contextlib.contextmanager
def push_errors(repo_id: str) -> Iterator[None]:
    """Convert errors of the hub library to an `OutputError` with cause and fix."""
    try:
        with explained(repo_id):
            yield
    except CheckpointError as error:
        status = _status(error.__cause__)
        text = REFUSED.get(status or 0)
        resumes = " The hub keeps the files sent: the same command goes on."
        said = f"HTTP {status}: {text}" if text else error.headline.removeprefix(f"{repo_id}: ") + resumes
        raise OutputError(f"Cannot write to {repo_id} on the hub: {said}") from error
    except (RuntimeError, ValueError) as error:  # from upload threads, or for card metadata that the hub refuses
        cause = error.__cause__ or error
        status = _status(cause)
        said = REFUSED.get(status or 0) or f"{in_one_line(error)}: {in_one_line(cause)[:300]}"
        raise OutputError(
            f"Cannot write to {repo_id} on the hub: {said} The hub keeps the files sent: the same command goes on."
        ) from error


class _HubStorage(Storage):
    def open_repository(self, repo_id: str, revision: str | None, *, streams: bool = False) -> HubRepository:
        return open_repository(repo_id, revision, streams=streams)

    def open_output(self, url: str) -> RemoteOutput:
        named = HUB_ID.fullmatch(url)
        if named is None:
            raise CheckpointError(f"{url}: expected hf://org/name or hf://org/name@revision, found something else")
        source = open_repository(named["repo"], named["revision"], streams=True)
        return RemoteOutput(source, source.names)

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
        stored = look_up(hub_name(self.url))
        check_place(stored, private=True, overwrite=self.overwrite)
        create(stored, private=True)
        return journal

    def send(self, names: Collection[str]) -> None:
        """Send all files in one commit."""
        stored = look_up(hub_name(self.url))
        push = plan_push(stored, self.path, names, private=True, overwrite=self.overwrite)
        send(push, "Merge with actmat")


HUB = _HubStorage()
