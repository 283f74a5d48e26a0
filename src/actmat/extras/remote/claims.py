"""Checks of what servers state, in one place for the hub, web servers and buckets.

Commits, versions, names, sizes, ranges and hashes come from whoever answers: a mirror, a proxy, another tenant. Each is
checked here before a path is made of it, or a byte behind it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.checkpoints.folder import is_plain_name, is_plain_path, shown
from actmat.checkpoints.hashing import sha256_file
from actmat.checkpoints.resolve import COMMIT
from actmat.errors import CheckpointError

SHA256 = re.compile("[0-9a-f]{64}")
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
MAX_SIZE = 10**18
"""Bytes of the largest file that a server may state."""
SHOWN_NAMES = 3
MAX_VERSION = 512
"""Longest version (ETag) of a file, in characters."""
TRUST = "Likely cause: a mirror or a proxy that is broken or hostile. Fix: use another server, or download the model."


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as it was first seen; `etag`: the version that the server states, on the hub the content hash."""

    name: str
    size: int
    etag: str


def changed(what: str, now: str) -> CheckpointError:
    """The error for a file whose version changed."""
    return CheckpointError(
        f"{what}: the file changed since it was opened: {now}. Likely cause: an upload in progress. Fix: wait until "
        "it is finished, then run again."
    )


def check_same(what: str, before: RemoteFile, now: RemoteFile) -> None:
    """Refuse another size or version than before.

    Raises:
        CheckpointError: names both.
    """
    if now != before:
        raise changed(what, f"{before.size} bytes, version {before.etag}; now {now.size} bytes, version {now.etag}")


def check_commit(what: str, commit: object, wanted: str = "") -> str:
    """The commit that a hub states.

    Args:
        what: in messages.
        found: from the answer.
        wanted: the revision that was asked for.

    >>> check_commit("org/name", "../../notes.txt")
    Traceback (most recent call last):
    actmat.errors.CheckpointError: org/name: expected a commit of 40 hexadecimal digits from the hub, found ...

    Raises:
        CheckpointError: not a commit, or another one than the commit that was asked for.
    """
    if not isinstance(commit, str) or COMMIT.fullmatch(commit) is None:
        raise CheckpointError(
            f"{what}: expected a commit of 40 hexadecimal digits from the hub, found {shown(commit)}. {TRUST}"
        )
    if COMMIT.fullmatch(wanted) and commit != wanted:
        raise CheckpointError(f"{what}: asked the hub for commit {wanted}, it answered with commit {commit}. {TRUST}")
    return commit


def stated_file(where: str, name: str, size: object, version: object) -> RemoteFile:
    """A file with the size and the version that its server states.

    Raises:
        CheckpointError: not a size, or not a version.
    """
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE:
        raise CheckpointError(f"{where}/{name}: expected a size in bytes from the server, found {shown(size)}. {TRUST}")
    is_text = isinstance(version, str) and version.isascii() and version.isprintable()
    if not is_text or not 0 < len(str(version)) <= MAX_VERSION:
        raise CheckpointError(
            f"{where}/{name}: expected a version (ETag) of at most {MAX_VERSION} printable characters, found "
            f"{shown(version)}. {TRUST}"
        )
    return RemoteFile(name, size, str(version))


def stated_files(where: str, rows: Iterable[tuple[object, object, object]]) -> dict[str, RemoteFile]:
    """Files of a listing of (name, size, version), by name; those whose names are not plain paths are left out.

    Raises:
        CheckpointError: an invalid size or version, or a file twice.
    """
    files: dict[str, RemoteFile] = {}
    for name, size, version in rows:
        if not isinstance(name, str) or not is_plain_path(name):
            continue
        file = stated_file(where, name, size, version)
        if files.setdefault(name, file) != file:
            raise CheckpointError(f"{where}: the server lists {shown(name)} twice, with other contents. {TRUST}")
    return files


def odd_names_note(names: Iterable[object]) -> tuple[str, ...]:
    """Remark for plans on listed files that `stated_files` leaves out; empty without any.

    >>> odd_names_note(["config.json", "../a", "b/../c"])
    ("its server lists files whose names are not plain paths, left out (2): '../a', 'b/../c'",)
    """
    odd = [shown(name) for name in names if not is_plain_path(name)]
    listed = ", ".join([*odd[:SHOWN_NAMES], *(["..."] if len(odd) > SHOWN_NAMES else [])])
    return (f"its server lists files whose names are not plain paths, left out ({len(odd)}): {listed}",) if odd else ()


def stated_total(what: str, headers: Mapping[str, Any], offset: int, length: int) -> int:
    """Bytes of the whole file, from the headers of an answer with bytes from `offset` on.

    Raises:
        CheckpointError: other bytes than those that were asked for, or no statement which.
    """
    text = str(headers.get("Content-Range", ""))
    match = CONTENT_RANGE.fullmatch(text)
    first, last, total = map(int, match.groups()) if match else (-1, -1, 0)
    stated = str(headers.get("Content-Length", last - first + 1))
    if first != offset or last != min(offset + length, total) - 1 or stated != str(last - first + 1):
        raise CheckpointError(
            f"{what}: requested bytes from {offset} to {offset + length - 1}, but the server sent the range "
            f"{text[:80]!r} in {stated[:20]} bytes. {TRUST}"
        )
    return total


def check_headers(answer: Any) -> None:
    """Check an answer of a hub before the hub library makes paths of its commit and ETag (a hook of its HTTP client).

    Raises:
        CheckpointError: not a commit, or an ETag that is not a plain name.
    """
    if "X-Repo-Commit" not in answer.headers:
        return
    what = str(answer.request.url)[:200]
    check_commit(what, answer.headers["X-Repo-Commit"])
    for header in ("X-Linked-Etag", "ETag"):
        version = answer.headers.get(header, "-").lstrip("W/").strip('"')  # as the hub library does
        if not is_plain_name(version):
            raise CheckpointError(f"{what}: expected a plain {header} from the hub, found {shown(version)}. {TRUST}")


def stated_version(what: str, pinned: RemoteFile, commit: str, answers: Iterable[Any]) -> str:
    """The version in answers of a hub for a file, redirects included; empty if only another server states one.

    Raises:
        CheckpointError: of another commit than `commit`, or of another SHA-256 than the announced one.
    """
    version = ""
    for answer in answers:
        if "X-Repo-Commit" in answer.headers:  # of the hub itself: a CDN has versions of its own
            check_commit(what, answer.headers["X-Repo-Commit"], commit)
            version = (answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag", "")).strip('"')
    if SHA256.fullmatch(pinned.etag) and SHA256.fullmatch(version) and version != pinned.etag:
        raise changed(what, f"announced with SHA-256 {pinned.etag}, now {version}")
    return version


def check_download(what: str, path: Path, pinned: RemoteFile) -> None:
    """Compare a downloaded file with its announced SHA-256, or with its size where only that was announced.

    Raises:
        CheckpointError: another content.
    """
    size = path.stat().st_size
    actual, wanted = f"{size} bytes", f"{pinned.size or size} bytes"
    if actual == wanted and SHA256.fullmatch(pinned.etag):
        actual, wanted = f"SHA-256 {sha256_file(path)}", f"SHA-256 {pinned.etag}"
    if actual != wanted:
        raise CheckpointError(f"{what}: as downloaded is not what the hub announced: {actual}, not {wanted}. {TRUST}")
