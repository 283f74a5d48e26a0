"""Checkpoints on the Hugging Face hub: headers over HTTP ranges, weights fetched when they are read.

Opening fetches the config and the shard index and reads the header of every shard through two small requests at most,
so that a merge can be planned before a single weight is downloaded. Torch files have no header to read: they are
downloaded when they are opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.folder import join_shards, read_config, read_index
from actmat.checkpoints.formats import weight_format
from actmat.checkpoints.header import read_header
from actmat.checkpoints.hub_repository import HubRepository, open_repository
from actmat.checkpoints.raw import check_range, empty_tensor, find_spec, raw_bytes
from actmat.checkpoints.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsCheckpoint, unindexed_files
from actmat.checkpoints.torch_files import TorchCheckpoint, choose_torch_file
from actmat.errors import CheckpointError

__all__ = ["HubCheckpoint", "open_hub"]

SIDECAR_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
PARALLEL_REQUESTS = 8


class HubCheckpoint(Checkpoint):
    """Tensors of one commit of a hub repository. A shard is downloaded when a tensor of it is first read.

    Args:
        repository: the pinned commit.
        specs: from the headers.
        weight_files: names of the weight files.
        torch_files: the open checkpoint, where the weights are torch files.
    """

    def __init__(
        self,
        repository: HubRepository,
        specs: Mapping[str, TensorSpec],
        weight_files: tuple[str, ...],
        *,
        torch_files: TorchCheckpoint | None = None,
    ) -> None:
        self.repository = repository
        self.location = repository.location
        self.specs = MappingProxyType(dict(specs))
        self.aliases = MappingProxyType(dict(torch_files.aliases) if torch_files else {})
        config = repository.fetch("config.json") if "config.json" in repository.files else None
        self.directory = config.parent if config is not None else None
        self._weight_files = weight_files
        self._torch_files = torch_files
        self._reader = FileReader({})
        self._ready: set[str] = set()
        self._locks = {name: threading.Lock() for name in weight_files}

    @property
    def commit(self) -> str:
        """Hash of the commit that is read, whatever branch was asked for."""
        return self.repository.commit

    @cached_property
    def _config(self) -> Mapping[str, Any] | None:
        return read_config(self.directory)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Parsed `config.json` of the commit."""
        return self._config

    def identity(self) -> tuple[FileIdentity, ...]:
        """Content hashes of the weight files as the hub states them; the same before and after the download."""
        files = (self.repository.files[name] for name in self._weight_files)
        return tuple(FileIdentity(f"{self.repository.repo_id}/{f.name}", f.size, etag=f.etag) for f in files)

    def read(self, name: str) -> Tensor:
        """The whole tensor; downloads its shard first if it is not cached."""
        if self._torch_files is not None:
            return self._torch_files.read(name)
        spec = find_spec(self, name)
        tensor = empty_tensor(spec)
        self._fill(spec, 0, raw_bytes(tensor))
        return tensor

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of the tensor; downloads its shard first if it is not cached."""
        if self._torch_files is not None:
            self._torch_files.read_into(name, start, out)
            return
        spec = find_spec(self, name)
        check_range(spec, start, out)
        self._fill(spec, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the system to read tensors of downloaded shards ahead; downloads nothing."""
        for spec in (self.specs[name] for name in names if name in self.specs):
            if spec.file in self._ready:
                self._reader.prefetch(spec.file, spec.offset, spec.nbytes)

    def fetch(self) -> None:
        """Download every weight file that is not cached."""
        for name in self._weight_files:
            self.repository.fetch(name)

    def fetch_sidecars(self) -> Path | None:
        """Download tokenizer, processor and other small files; the folder that holds them, None if there are none."""
        folder = self.directory
        for name in self.repository.files:
            path = PurePosixPath(name)
            is_index = name.endswith(".index.json")
            is_template = str(path.parent) == "additional_chat_templates"
            if path.suffix in SIDECAR_SUFFIXES and not is_index and (len(path.parts) == 1 or is_template):
                fetched = self.repository.fetch(name)
                folder = folder or fetched.parents[len(path.parts) - 1]
        return folder

    def close(self) -> None:
        """Close the shards that were opened."""
        self._reader.close()
        if self._torch_files is not None:
            self._torch_files.close()

    def _fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        if not self._reader.closed:
            self._make_ready(spec.file)
        self._reader.read_into(spec.file, spec.offset + start, out, tensor=spec.name)

    def _make_ready(self, label: str) -> None:
        """Download a shard and check it against the header that was planned with, once."""
        with self._locks[label]:  # one download per shard, however many threads want it
            if label in self._ready:
                return
            path = self.repository.fetch(label)
            expected = {name: spec for name, spec in self.specs.items() if spec.file == label}
            with SafetensorsCheckpoint(self.location, {label: path}) as shard:
                if shard.specs != expected:
                    raise CheckpointError(
                        f"{self.location}: {label} as downloaded is not what the hub announced. "
                        f"Fix: remove it from the cache ({self.repository.cache_dir}) and run again."
                    )
            self._reader.add(label, path)
            self._ready.add(label)


def open_hub(repo_id: str, revision: str | None = None, *, cache_dir: str | Path | None = None) -> HubCheckpoint:
    """Open `repo_id` (`org/name`) at a revision (branch, tag or commit; `main` if None).

    Raises:
        CheckpointError: no such repository or revision, no access, offline and not cached, or unusable weights.
    """
    repository = open_repository(repo_id, revision, cache_dir=cache_dir)
    names = [name for name in repository.files if "/" not in name]
    if weight_format(names, repository.location) == "torch":
        return _open_torch(repository, names)
    weight_map: Mapping[str, str] | None = None
    if INDEX_NAME in names:
        weight_map = read_index(repository.fetch(INDEX_NAME))
        labels = sorted(set(weight_map.values()))
    else:
        labels = [SINGLE_NAME] if SINGLE_NAME in names else unindexed_files(names, repository.location)
    _require(repository, labels)
    with ThreadPoolExecutor(min(PARALLEL_REQUESTS, len(labels))) as pool:
        shards = dict(zip(labels, pool.map(lambda label: _specs_of(repository, label), labels), strict=True))
    specs = join_shards(shards, weight_map, location=repository.location)
    return HubCheckpoint(repository, specs, tuple(labels))


def _open_torch(repository: HubRepository, names: list[str]) -> HubCheckpoint:
    chosen = choose_torch_file(names, repository.location)
    weight_map = read_index(repository.fetch(chosen)) if chosen.endswith(".index.json") else None
    labels = sorted(set(weight_map.values())) if weight_map else [chosen]
    _require(repository, labels)
    files = {label: repository.fetch(label) for label in labels}
    local = TorchCheckpoint(repository.location, files, None, weight_map)
    return HubCheckpoint(repository, local.specs, tuple(labels), torch_files=local)


def _require(repository: HubRepository, labels: list[str]) -> None:
    missing = [label for label in labels if label not in repository.files]
    if missing:
        raise CheckpointError(
            f"{repository.location}: weight files that the index names are not in the repository (or, offline, not in "
            "the cache)",
            [f"{repository.location}: {label} is missing at commit {repository.commit}" for label in missing],
        )


def _specs_of(repository: HubRepository, label: str) -> Mapping[str, TensorSpec]:
    """Specs of one shard: from the cached file where there is one, else over HTTP ranges."""
    path = repository.cached(label)
    if path is not None:
        with SafetensorsCheckpoint(repository.location, {label: path}) as local:
            return local.specs
    read_at: Callable[[int, int], bytes] = repository.reader(label)
    return read_header(read_at, repository.files[label].size, file=label).specs
