"""`Source`: the files of one location by name, wherever they are; tensors in such files.

A location is a local folder, a local file, a commit of a hub repository (`hub.HubRepository`), or a folder or file at a
URL (`remote.Storage`). A format opens a model from a source without asking which of them it is. A file
that is not local is either downloaded when a tensor of it is first read, or, if the source `streams`, read by ranges.
"""

from __future__ import annotations

import abc
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from actmat.bounds import kind_of_file, list_folder
from actmat.checkpoints import folder
from actmat.checkpoints.base import FileIdentity, Tensors, TensorsHandle, TensorSpec, versions_of_files
from actmat.checkpoints.files import file_identity
from actmat.checkpoints.side_files import SideFiles, list_tree, side_files_in
from actmat.checkpoints.tied_names import may_be_tied
from actmat.errors import CheckpointError


class Source(abc.ABC):
    """Files by name.

    Attributes:
        location: what the user called it, for messages.
        names: names of the files at the top level, sorted.
        named: the file, where the user named a file; None for a folder or a repository.
        hub_id: `org/name` of a repository of the hub, else empty.
        cache_dir: folder of downloads that outlives the process, or None.
        streams: tensors of files that are not local are read by ranges, through `read_range`.
        can_list: `names` has all files of the folder; a web server cannot list its files.
        notes: remarks for plans.
    """

    location: str
    names: Sequence[str]
    named: str | None = None
    hub_id: str = ""
    cache_dir: Path | None = None
    streams: bool = False
    can_list: bool = True
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> list[str]:
        """Names of files that may be weights: the named file, or all but those of adapters and of training.

        Files in formats that are not read are left out.
        """
        names = (name for name in self.names if name == self.named or folder.may_be_weights(name))
        return [name for name in names if not folder.foreign_format(name)]

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Text that names the same files in any process: an absolute path, or `hf://org/name@commit`."""

    @property
    @abc.abstractmethod
    def directory(self) -> Path | None:
        """Local folder of `config.json`, or None."""

    @abc.abstractmethod
    def local(self, name: str) -> Path | None:
        """Path of a file, or None if it is not local."""

    @abc.abstractmethod
    def fetch(self, name: str) -> Path:
        """Path of a file, downloaded first if it is not local."""

    @abc.abstractmethod
    def weight_map(self, index: str) -> dict[str, str]:
        """Tensor name -> file name, from an index file; every file named there exists."""

    @abc.abstractmethod
    def identity(self, names: Iterable[str]) -> tuple[FileIdentity, ...]:
        """Identity of files; reads and downloads none."""

    def read_remote(self, name: str) -> tuple[Callable[[int, int], bytes], int]:
        """`read_at(offset, length)` and the size of a file that is not local, to read its header."""
        raise NotImplementedError(f"{self.location}: {name} is local")

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a file that is not local, with retries; the same version of the file as in `identity`.

        Raises:
            CheckpointError: the file changed, or is unreachable; names it.
        """
        raise NotImplementedError(f"{self.location}: {name} is local")

    def child(self, name: str) -> Source | None:
        """The files of a folder inside this one, or None without such a folder.

        Raises:
            CheckpointError: this kind of source has no subfolders.
        """
        raise CheckpointError(
            f"{self.location}: a pipeline of several models is read from a local folder or from the hub. Fix: download "
            "the folder, and give it."
        )

    @abc.abstractmethod
    def only(self, name: str) -> Source:
        """The same files with `name` as the named one, downloaded when it is first read: for adapters, read often."""

    @abc.abstractmethod
    def whole(self) -> Source:
        """The folder of a named file."""

    def side_files(self, merged: Sequence[str]) -> SideFiles:
        """Files to copy to an output, given the merged weight files; downloads only the tables that name folders."""
        return SideFiles()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of the side files, downloaded first if they are not local."""
        return self.directory

    def close(self) -> None:  # noqa: B027 - most have nothing to remove
        """Remove copies of files that nothing else uses. May be called twice."""


class LocalSource(Source):
    """A folder, weight file or index file on this machine."""

    def __init__(self, path: Path, location: str | None = None) -> None:
        self.location = str(path) if location is None else location
        self._path = path
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise CheckpointError(f"{self.location}: cannot be read: {error.strerror}") from error
        is_folder = stat.S_ISDIR(mode)
        if not is_folder and not stat.S_ISREG(mode):
            raise CheckpointError(f"{self.location}: expected a file or a folder, found {kind_of_file(mode)}")
        self._folder = path if is_folder else path.parent
        self.named = None if is_folder else path.name
        self.names = list_folder(path) if is_folder else [path.name]
        self._members: dict[str, Path] = {}

    @property
    def address(self) -> str:
        """Absolute path, links kept."""
        return str(self._path.absolute())

    @property
    def directory(self) -> Path | None:
        """The folder, also that of an index file; None for a weight file."""
        return self._folder if self.named is None or self.named.endswith(folder.INDEX_SUFFIX) else None

    def local(self, name: str) -> Path:
        """Path of a file."""
        return self.fetch(name)

    def fetch(self, name: str) -> Path:
        """Path of a file, checked once: it exists, and no link leads out of the folder."""
        if name == self.named:
            return self._path
        if name not in self._members:
            self._members[name] = folder.member(self._folder, name)
        return self._members[name]

    def weight_map(self, index: str) -> dict[str, str]:
        """Content of an index file of the folder."""
        weight_map = folder.read_index(self._folder / index)
        problems: list[str] = []
        for name in sorted(set(weight_map.values())):
            try:
                self.fetch(name)
            except CheckpointError as error:
                problems.extend(error.problems)
        if problems:
            raise CheckpointError(f"{self.location}: shards that {index} names cannot be used", problems)
        return weight_map

    def child(self, name: str) -> Source | None:
        """A folder inside; links to folders are not followed."""
        path = self._folder / name
        if not folder.is_plain_name(name) or path.is_symlink() or not path.is_dir():
            return None
        return LocalSource(path, f"{self.location}/{name}")

    def only(self, name: str) -> LocalSource:
        """A file of the folder."""
        return LocalSource(self.fetch(name), self.location)

    def whole(self) -> LocalSource:
        """The folder of a named file."""
        return self if self.named is None else LocalSource(self._folder, self.location)

    def side_files(self, merged: Sequence[str]) -> SideFiles:
        """Files of the folder; empty if a weight file was named."""
        place = self.directory
        return SideFiles() if place is None else side_files_in(list_tree(place), merged, self.fetch)

    def identity(self, names: Iterable[str]) -> tuple[FileIdentity, ...]:
        """Size and times of files."""
        return tuple(file_identity(self.fetch(name)) for name in names)


class TensorFiles(Tensors):
    """Base of tensors in files: identity and handle come from the source.

    Attributes:
        source, labels: the files, and the names of those with weights.
        header: texts in their headers; empty for formats without them.
        absent: names that an index lists and no file holds.
        notes: remarks for plans.
    """

    header: Mapping[str, str] = {}
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(self, source: Source, labels: Sequence[str]) -> None:
        self.source, self.labels, self.location = source, tuple(labels), source.location

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of every weight file."""
        return self.source.identity(self.labels)

    def handle(self) -> TensorsHandle:
        """Address of the source, and the versions of remote files."""
        return handle_of(self.source, self.identity())

    def close(self) -> None:
        """Close the source."""
        self.source.close()


def handle_of(source: Source, files: Iterable[FileIdentity]) -> TensorsHandle:
    """Handle of tensors in some files of a source."""
    return TensorsHandle(source.address, source.location, source.streams, versions_of_files(files))


def join_shards(
    shards: Mapping[str, Mapping[str, TensorSpec]], weight_map: Mapping[str, str] | None, *, location: str
) -> dict[str, TensorSpec]:
    """Specs of all files in order; every disagreement between files, or with the index, is an error."""
    specs: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for label, shard in shards.items():
        for name, spec in shard.items():
            if name in specs:
                problems.append(f"tensor {folder.shown(name)}: in {specs[name].file} and again in {label}")
            elif weight_map is not None and name not in weight_map:
                problems.append(f"tensor {folder.shown(name)}: in {label}, but not in the index")
            else:
                specs[name] = spec
    for name, label in (weight_map or {}).items():
        stored = specs.get(name)
        if stored is None and may_be_tied(name):
            continue  # see `TensorFiles.absent`
        if stored is None:
            problems.append(f"tensor {folder.shown(name)}: the index says {label}, which does not hold it")
        elif stored.file != label:
            problems.append(f"tensor {folder.shown(name)}: the index says {label}, it is in {stored.file}")
    if problems:
        raise CheckpointError(
            f"{location}: the shards do not agree with each other or with the index. Likely cause: files of two saves "
            "mixed in one folder. Fix: fetch or save the whole folder again",
            problems,
        )
    return specs
