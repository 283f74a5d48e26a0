"""Files of a web server, read by HTTP ranges (RFC 9110, section 14).

fsspec's HTTP file system hides response headers. They show whether a range was honored (otherwise a whole shard would
be sent for every block) and whether the file changed since it was opened, so requests use the HTTP client of
`huggingface_hub`. A web server has no standard way to list a folder; `list` returns None.
"""

from __future__ import annotations

import base64
import netrc
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

from actmat.errors import CheckpointError
from actmat.extras.remote.claims import RemoteFile, check_same, stated_file, stated_total
from actmat.extras.remote.retry import ranged, read_body
from actmat.extras.remote.store import MissingFileError, Store

MISSING = {404: "not found", 410: "gone", 401: "login required", 403: "forbidden"}


class HttpStore(Store):
    """A folder of a web server. Logins come from ~/.netrc."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._login = _netrc_login(urlsplit(url).hostname or "")

    def list(self) -> None:
        """Return None: files are requested by name."""
        return

    def head(self, name: str, length: int) -> tuple[RemoteFile, bytes]:
        """Get the file and its first bytes in one request."""
        return self._get(name, 0, length, None)

    def read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """Read a range; the response's size and version are compared with those of `file`."""
        return self._get(file.name, offset, length, file)[1] if length else b""

    def _get(self, name: str, offset: int, length: int, pinned: RemoteFile | None) -> tuple[RemoteFile, bytes]:
        url = f"{self.url}/{quote(name)}"
        with ranged(url, offset, length, self._login) as answer:
            size = _size(answer, url, offset, length)
            file = stated_file(self.url, name, size, _version(answer, url))
            check_same(url, pinned or file, file)
            return file, read_body(answer, min(length, size - offset))


def _size(answer: Any, url: str, offset: int, length: int) -> int:
    """Size of the whole file, from the headers of a range response; raises for any other response."""
    status = answer.status_code
    if status == 206:
        return stated_total(url, answer.headers, offset, length)
    if status == 200:
        stated = answer.headers.get("Content-Length", "")
        if offset == 0 and stated.isdecimal() and int(stated[:19]) <= length and not url.endswith(".safetensors"):
            return int(stated)  # a small file sent whole
        raise CheckpointError(
            f"{url}: the server ignores Range requests, so every tensor would transfer the whole file. "
            "Fix: download the folder and pass its path, or use a server that honors Range requests."
        )
    if status in MISSING:
        fix = "Fix: correct the address" + ("" if status in (404, 410) else ", or add a login to ~/.netrc")
        raise MissingFileError(f"{url}: {MISSING[status]} (HTTP {status}). {fix}.")
    if status == 416:
        reason = "the file changed since it was opened" if offset else "expected a file with content"
        raise CheckpointError(f"{url}: {reason}: the server has no bytes from {offset} on (HTTP 416)")
    raise CheckpointError(f"{url}: expected bytes of a file, found HTTP {status}")


def _version(answer: Any, url: str) -> str:
    """The response's validator: ETag, else Last-Modified."""
    version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
    if not version:
        raise CheckpointError(
            f"{url}: the server sends neither ETag nor Last-Modified, so a change during the merge would not "
            "be detected. Fix: download the folder and pass its path."
        )
    return str(version)


def _netrc_login(host: str) -> dict[str, str]:
    """Header for basic authorization from ~/.netrc; may be empty."""
    with suppress(OSError, netrc.NetrcParseError):
        login = netrc.netrc().authenticators(host)
        if login is not None:
            pair = f"{login[0]}:{login[2]}".encode()
            return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
    return {}
