"""Safetensors files: one file, or a folder of shards.

The weights of a folder or repository, in this order:

1. `model.safetensors.index.json`: the shards it names. A local folder that also holds a `model.safetensors` which the
   index does not name is ambiguous, and refused.
2. `model.safetensors`. Diffusers' `diffusion_pytorch_model` counts like `model`; variants (`model.fp16.safetensors`,
   `model.safetensors.index.fp16.json`) count if all weights have one.
3. exactly one other `*.safetensors`: that file.
4. several without an index: read as one checkpoint when they are one complete numbered set
   (`name-00001-of-00003.safetensors` ...), which says what the missing index would; refused otherwise.

Tensors are read with positional reads straight into their destination: no mapping, no copy. A shard that is not local
is read by ranges, or downloaded when a tensor of it is first read, as its source says.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.folder import INDEX_SUFFIX
from actmat.checkpoints.header import read_header
from actmat.checkpoints.model import Format, Model, stored_model
from actmat.checkpoints.ranges import BLOCK_BYTES, BLOCKS_PER_THREAD, RangeReader
from actmat.checkpoints.source import Source, TensorFiles, join_shards
from actmat.errors import CheckpointError

STEMS = ("model", "diffusion_pytorch_model")
"""Starts of the names of weight files that libraries save: transformers' and diffusers'."""
_INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?:\.(?P<variant>[\w-]+))?\.json")
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
PARALLEL_REQUESTS = 8


class SafetensorsFiles(TensorFiles):
    """Tensors of safetensors files; opening reads only the headers, which must agree with `weight_map`."""

    def __init__(self, source: Source, labels: Sequence[str], weight_map: Mapping[str, str] | None = None) -> None:
        super().__init__(source, labels)
        paths = {label: source.local(label) for label in labels}
        self._reader = FileReader({label: path for label, path in paths.items() if path is not None})
        self._remote = {label for label, path in paths.items() if path is None}
        self._metadata: dict[str, Mapping[str, str]] = {}
        self._downloads = {label: threading.Lock() for label in self._remote}
        self._ranges = RangeReader(source.read_range) if source.streams and self._remote else None
        try:
            headers = self._read_headers()
            self.specs = MappingProxyType(join_shards(headers, weight_map, location=self.location))
            self.absent = tuple(n for n in weight_map or () if n not in self.specs)
            self.header = {key: text for label in self.labels for key, text in self._metadata[label].items()}
            if self._ranges is not None:
                for label in self._remote:
                    self._ranges.add(label, headers[label].values())
        except CheckpointError:
            self._reader.close()
            raise

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the system to read these tensors ahead; of a remote one, the first block is fetched."""
        for spec in (self.specs[name] for name in names if name in self.specs):
            if spec.file in self._remote:
                if self._ranges is not None:
                    self._ranges.prefetch(spec.file, spec.offset)
            else:
                self._reader.prefetch(spec.file, spec.offset, spec.nbytes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the blocks of remote files."""
        return 0 if self._ranges is None else BLOCKS_PER_THREAD * BLOCK_BYTES

    def close(self) -> None:
        """Close the files, and end requests."""
        super().close()
        self._reader.close()
        if self._ranges is not None:
            self._ranges.close()

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Read from the file straight into `out`."""
        if spec.file in self._remote and self._ranges is not None:
            self._ranges.read_into(spec.file, spec.offset + start, out, tensor=spec.name)
            return
        if spec.file in self._remote and not self._reader.closed:
            self._download(spec.file)
        self._reader.read_into(spec.file, spec.offset + start, out, tensor=spec.name)

    def _download(self, label: str) -> None:
        """Download a shard, and check it against the header that was read when the checkpoint was opened."""
        with self._downloads[label]:  # one download per shard, however many threads want it
            if label not in self._remote:
                return
            self._reader.add(label, self.source.fetch(label))
            if self._local_specs(label) != {name: spec for name, spec in self.specs.items() if spec.file == label}:
                raise CheckpointError(
                    f"{self.location}: {label} as downloaded is not what the hub announced. "
                    f"Fix: remove it from the cache ({self.source.cache_dir}) and run again."
                )
            self._remote.discard(label)

    def _local_specs(self, label: str) -> Mapping[str, TensorSpec]:
        return self._noted(label, self._reader.size(label), partial(self._reader.read, label))

    def _noted(self, label: str, size: int, read_at: Callable[[int, int], bytes]) -> Mapping[str, TensorSpec]:
        specs, self._metadata[label] = read_header(read_at, size, file=label)
        return specs

    def _read_headers(self) -> dict[str, Mapping[str, TensorSpec]]:
        """Specs of every file by label, through parallel requests; the problems of all files are raised together."""
        problems: dict[str, Sequence[str]] = {}

        def specs_of(label: str) -> Mapping[str, TensorSpec]:
            try:
                if label not in self._remote:
                    return self._local_specs(label)
                read_at, size = self.source.read_remote(label)
                return self._noted(label, size, read_at)
            except CheckpointError as error:
                problems[label] = error.problems
                return {}

        with ThreadPoolExecutor(min(PARALLEL_REQUESTS, len(self.labels))) as pool:
            headers = dict(zip(self.labels, pool.map(specs_of, self.labels), strict=True))
        if problems:
            listed = [problem for label in self.labels for problem in problems.get(label, ())]
            raise CheckpointError(f"{self.location}: weight files that cannot be used", listed)
        return headers


def _claims(source: Source) -> bool:
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in source.weights)


def _open(source: Source) -> Model:
    """Open the weights in a source, chosen by the rules in the module's docstring."""
    names, named = source.weights, source.named
    singles = [f"{stem}.safetensors" for stem in STEMS]
    index = next((f"{name}.index.json" for name in singles if f"{name}.index.json" in names), None)
    single = next((name for name in singles if name in names), None)
    if named is not None:
        index = named if named.endswith(INDEX_SUFFIX) or _INDEX.fullmatch(named) else None
    elif index is None and single is None:
        variants = [n for n in names if (m := _INDEX.fullmatch(n)) is not None and m["stem"] in STEMS]
        index = variants[0] if len(variants) == 1 else None
    if index is not None:
        weight_map = source.weight_map(index)
        labels = sorted(set(weight_map.values()))
        is_local_folder = named is None and source.cache_dir is None
        if is_local_folder and single is not None and single not in labels:
            raise CheckpointError(
                f"{source.location}: holds both {index} and a {single} that the index does not name. Likely "
                "cause: two saves into one folder. Fix: remove the older one, or give the path of the one you mean."
            )
        return stored_model(SafetensorsFiles(source, labels, weight_map))
    if named is not None:
        return stored_model(SafetensorsFiles(source, [named]))
    labels = [single] if single is not None else _unindexed_files(names, source.location)
    return stored_model(SafetensorsFiles(source, labels))


SAFETENSORS = Format(_claims, _open)


def _unindexed_files(names: Sequence[str], location: str) -> list[str]:
    """Weight files of a folder without index and without `model.safetensors`, given the sorted names in it."""
    names = [name for name in names if name.endswith(".safetensors")]
    if len(names) == 1:
        return names
    if not names:
        raise CheckpointError(f"{location}: no safetensors file in this folder")
    matches = [NUMBERED.fullmatch(name) for name in names]
    sets = {(m["stem"], m["count"]) for m in matches if m}
    numbers = [int(m["number"]) for m in matches if m]
    if len(sets) == 1 and all(matches) and numbers == list(range(1, int(next(iter(sets))[1]) + 1)):
        return names
    raise CheckpointError(
        f"{location}: expected model.safetensors, its index, one safetensors file or one complete numbered set, found "
        f"{len(names)} files: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}. Likely cause: several "
        "checkpoints in one folder, or shards whose index or siblings are missing. Fix: give the path of one file, or "
        "fetch what is missing."
    )
