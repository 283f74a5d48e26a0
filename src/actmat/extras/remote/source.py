"""A folder or file at a URL as a `Source`: files are pinned at first access, small ones copied to a local folder.

Opening lists the folder once (from a web server, which cannot list, the usual names are requested) and reads the header
of every shard with one request. Tensors are read by ranges; configs and tokenizers are downloaded into a temporary
folder, which is removed when the source is closed, and at the latest with the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from actmat.bounds import MAX_BYTES
from actmat.checkpoints.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX_SUFFIX,
    is_plain_name,
    is_plain_path,
    read_config,
)
from actmat.checkpoints.formats.safetensors import PARALLEL_REQUESTS
from actmat.checkpoints.formats.torch_files import TORCH_SUFFIXES
from actmat.checkpoints.ranges import BLOCK_BYTES
from actmat.checkpoints.side_files import SideFiles, code_files, side_files_in
from actmat.errors import CheckpointError, Note
from actmat.extras.remote.claims import RemoteFile, check_same
from actmat.extras.remote.files import RemoteFiles
from actmat.extras.remote.objects import open_store
from actmat.extras.remote.retry import FIRST_RANGE, retried
from actmat.extras.remote.store import MissingFileError, Store, check_url, split_url
from actmat.system import temporary_folder

MODEL_NAMES = ("model.safetensors.index.json", "model.safetensors", "config.json", ADAPTER_CONFIG, *ADAPTER_WEIGHTS)
TORCH_NAMES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
UNLISTED = Note("note", "unlisted", "the web server cannot list its files: only well-known names were requested")

SIDECAR_NAMES = (
    "LICENSE", "modules.json", "tekken.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "vocab.json", "added_tokens.json", "vocab.txt", "merges.txt",
    "spiece.model", "chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json",
    "image_processor_config.json", "video_preprocessor_config.json", "feature_extractor_config.json",
)  # fmt: skip
"""Files requested from a server that cannot list."""


class RemoteSource(RemoteFiles):
    """Files at a URL.

    Args:
        store: store of the folder.
        location: the location as given by the user.
        named: name of the file, if the user gave one.
        streams: read tensors by ranges; otherwise a weight file is downloaded when first read.
        pinned: name -> required (size, etag), from the process that created the handle.
    """

    def __init__(
        self,
        store: Store,
        location: str,
        named: str | None = None,
        *,
        streams: bool = True,
        pinned: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        self.location = location
        self.named = named
        self.streams = streams
        self.store, self.home = store, f"{store.url}/"
        self._pinned = dict(pinned or {})
        self._files: dict[str, RemoteFile] = {}
        self._heads: dict[str, bytes] = {}
        self._copies: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._removal: weakref.finalize[..., RemoteSource] | None = None
        if named is not None and not named.endswith(INDEX_SUFFIX):
            self.names = [named]
            return
        listed = retried(store.list, location)
        self.can_list, self.notes = listed is not None, store.notes
        if listed is None:
            model_files = self._probe(MODEL_NAMES) or self._probe(TORCH_NAMES)
        else:
            model_files = list(listed)
            for file in listed.values():
                self._pin(file)
        if not model_files:
            raise CheckpointError(
                f"{location}: expected a model or an adapter, found nothing there. "
                + ("" if listed is not None else f"Requested: {', '.join((*MODEL_NAMES, *TORCH_NAMES))}. ")
                + "Fix: correct the URL, log in, or give the URL of the weight file."
            )
        self.names = sorted({*model_files, *([named] if named else [])})

    can_list = False

    @property
    def address(self) -> str:
        """The URL."""
        return self.store.url if self.named is None else f"{self.store.url}/{self.named}"

    @cached_property
    def directory(self) -> Path | None:
        """Temporary folder with `config.json`; None if it is missing, and for a weight file."""
        return self.fetch("config.json").parent if "config.json" in self.names else None

    def local(self, name: str) -> Path | None:
        """Path of a downloaded file, or None."""
        return self._copies.get(name)

    def fetch(self, name: str) -> Path:
        """Download a file into the temporary folder; returns its path.

        Raises:
            CheckpointError: a torch file (a pickle without a header), or an oversized config.
        """
        if not is_plain_path(name):
            raise CheckpointError(f"{self.location}: {name[:200]!r} is not a plain file name")
        if name.endswith(TORCH_SUFFIXES):
            raise CheckpointError(
                f"{self.location}: {name} is a torch file, which cannot be read by ranges. "
                "Fix: download the folder and pass its path, or convert it to safetensors."
            )
        with self._lock:
            if name not in self._copies:
                self._copies[name] = self._download(name)
            return self._copies[name]

    def start_of(self, name: str) -> bytes:
        """The first bytes of a file, received with its size and version."""
        self.file(name, length=FIRST_RANGE)
        return self._heads.pop(name, b"")

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Read bytes of a pinned file, with retries."""
        file = self.file(name)
        return retried(lambda: self.store.read(file, offset, length), f"{self.store.url}/{name}")

    def side_files(self, merged: Sequence[str]) -> SideFiles:
        """Files of the folder and its subfolders; well-known names if it cannot be listed."""
        if self.named is not None and not self.named.endswith(INDEX_SUFFIX):
            return SideFiles()
        sizes = {name: self.file(name).size for name in (*self.names, *self._others)}
        sorted_files = side_files_in(sizes, merged, self.fetch)
        if self.can_list:
            return sorted_files
        return replace(sorted_files, left_out={**sorted_files.left_out, "(other files)": UNLISTED})

    @cached_property
    def _others(self) -> list[str]:
        """Files in subfolders; well-known names if the folder cannot be listed."""
        if not self.can_list:
            if self.directory is None:
                return []
            code = filter(is_plain_name, code_files(read_config(self.directory) or {}))
            return self._probe([n for n in (*SIDECAR_NAMES, *code) if n not in self.names])
        below = retried(self.store.below, self.location)
        for file in below.values():
            self._pin(file)
        return list(below)

    def only(self, name: str) -> RemoteSource:
        """The same files with `name` as the named file, downloaded at first read; for adapters, read often."""
        source = RemoteSource(self.store, self.location, name, streams=False, pinned=self._pinned)
        source._files, source._heads = self._files, self._heads
        return source

    def whole(self) -> RemoteSource:
        """Source of the named file's whole folder."""
        return self if self.named is None else open_remote(self.store.url, pinned=self._pinned)

    def close(self) -> None:
        """Remove the temporary folder; a file that is asked for again is downloaded again."""
        with self._lock:
            if self._removal is not None:
                self._removal()
            self._folder = self._removal = None
            self._copies.clear()
            self.__dict__.pop("directory", None)

    def _probe(self, names: Iterable[str]) -> list[str]:
        """Names that exist on the server; their first bytes are cached."""

        def has(name: str) -> bool:
            try:
                self.file(name, length=FIRST_RANGE)
            except MissingFileError:
                return False
            return True

        names = list(names)
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            return [name for name, exists in zip(names, pool.map(has, names), strict=True) if exists]

    def file(self, name: str, *, length: int = 1) -> RemoteFile:
        """The pinned file; requested with its first `length` bytes at first access."""
        if name not in self._files or (length > 1 and name not in self._heads):
            known = self._files.get(name)
            if known is not None and self.can_list:
                size = min(length, known.size)
                self._heads[name] = retried(lambda: self.store.read(known, 0, size), f"{self.store.url}/{name}")
            else:
                file, head = retried(lambda: self.store.head(name, max(length, 1)), f"{self.store.url}/{name}")
                self._pin(file)
                self._heads[name] = head
        return self._files[name]

    def _pin(self, file: RemoteFile) -> None:
        before = self._pinned.setdefault(file.name, (file.size, file.etag))
        check_same(f"{self.store.url}/{file.name}", RemoteFile(file.name, *before), file)
        self._files[file.name] = file

    def _download(self, name: str) -> Path:
        is_weights = (name in self.weights and self.named == name) or name.endswith(".safetensors")
        file = self.file(name, length=1 if is_weights else FIRST_RANGE)
        if not is_weights and file.size > MAX_BYTES:
            raise CheckpointError(
                f"{self.location}: expected {name} to have at most {MAX_BYTES} bytes, found {file.size}"
            )
        if self._folder is None:
            self._folder, remove = temporary_folder("remote")
            self._removal = weakref.finalize(self, remove)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        start = self._heads.pop(name, b"")
        with path.open("wb") as out:
            out.write(start)
            for offset in range(len(start), file.size, BLOCK_BYTES):
                out.write(self.read_range(name, offset, min(BLOCK_BYTES, file.size - offset)))
        return path


def open_remote(url: str, *, pinned: Mapping[str, tuple[int, str]] | None = None) -> RemoteSource:
    """Open the folder or file at a URL, by its suffix; requests names and sizes.

    Raises:
        CheckpointError: nothing found, no access, an unknown scheme, or a package is missing.
    """
    location = check_url(url)
    folder, name = split_url(location)
    if name is not None and PurePosixPath(name).suffix == ".json" and not name.endswith(INDEX_SUFFIX):
        raise CheckpointError(f"{location}: expected a folder, a weight file or an index, found a URL of '{name}'")
    return RemoteSource(open_store(folder), location, name, pinned=pinned)
