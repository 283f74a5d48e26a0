"""Metadata of a statistics file: the JSON text in it as strict models.

`docs/formats/statistics.md` describes the format to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from actmat.bounds import check_values
from actmat.checkpoints.hashing import ContentHash, hash_names
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import StatisticsError
from actmat.experts.lora.adapter import Adapter

FILE_NAME = "statistics.safetensors"
METADATA_KEY = "actmat_statistics"
MAX_WIDTH = 1 << 20
MAX_COUNT = 1 << 53
"""Largest number of samples, tokens or rows: a divisor that every float holds exactly."""

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _StrictHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GramOf(_StrictHeader):
    """The Gram matrix of a stored tensor, or of a part of it: expert `expert` of a stack, output features `rows`."""

    gram: str
    expert: Count | None = None
    rows: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None


class GramInfo(_StrictHeader):
    """One Gram matrix: width, number of rows summed, the stack whose tokens a mean is taken over, content hash."""

    width: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    groups: Annotated[int, Field(gt=0, le=MAX_WIDTH)] = 1
    rows: Count
    stack: str | None = None
    hash: Hash


class AdapterInfo(_StrictHeader):
    """The adapter that was on the model."""

    location: str
    content: Hash


class ModelInfo(_StrictHeader):
    """The checkpoint that was measured: content hash of every stored tensor, and of all of them together."""

    location: str
    architecture: str | None = None
    content: Hash
    tensors: dict[str, Hash]
    adapter: AdapterInfo | None = None


class DataInfo(_StrictHeader):
    """One set of batches: its source, and the hash of the model's inputs."""

    source: str
    fingerprint: Hash
    samples: Count
    tokens: Count
    details: dict[str, str] = {}


class StatisticsHeader(_StrictHeader):
    """Metadata of a statistics file."""

    format: Literal[1] = 1
    model: ModelInfo
    data: list[DataInfo]
    samples: Count
    tokens: Count
    grams: dict[str, GramInfo] = {}
    places: dict[str, list[GramOf]] = {}
    stacks: dict[str, Count] = {}
    memory: dict[str, str] = {}
    absent: dict[str, str] = {}
    fisher: dict[str, Hash] = {}
    fisher_samples: Count = 0
    fisher_labels: str = ""
    counts: dict[str, Hash] = {}
    versions: dict[str, str] = {}

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of statistics in the file, as methods name them in their needs."""
        return frozenset(kind for kind, table in (("gram", self.grams), ("fisher", self.fisher)) if table)

    def tensor_hashes(self) -> dict[str, str]:
        """Stored tensor -> hash of its bytes."""
        tables = {"gram": {k: g.hash for k, g in self.grams.items()}, "fisher": self.fisher, "counts": self.counts}
        return {f"{prefix}.{name}": h for prefix, table in tables.items() for name, h in table.items()}


def parse_header(metadata: Mapping[str, str], location: str) -> StatisticsHeader:
    """Parse the metadata of a statistics file; all problems are raised together."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise StatisticsError(
            f"{location}: expected statistics made by 'actmat statistics collect', found a safetensors file without "
            f"'{METADATA_KEY}' in its metadata"
        )
    check_values(text.encode(), location, error=StatisticsError)
    try:
        return StatisticsHeader.model_validate_json(text)
    except ValidationError as error:
        problems = [f"{location}: {'.'.join(map(str, e['loc']))}: {e['msg']}"[:300] for e in error.errors()[:50]]
        raise StatisticsError(f"{location}: its metadata are not valid.", problems) from None
    except RecursionError:
        raise StatisticsError(f"{location}: its metadata are nested too deeply.") from None


def content_hash(tensor: Tensor) -> str:
    """Content hash of a tensor's bytes."""
    seen = ContentHash()
    seen.update(raw_bytes(tensor.detach().cpu().resolve_neg().contiguous()))
    return seen.hexdigest()


def adapter_content(adapter: Adapter) -> str:
    """Content hash of an adapter's state: its tensors and the scaling that its config gives them."""
    scales = {f"{m.name} scaling": f"{m.scaling!r}" for m in adapter.modules.values()}
    return hash_names([*adapter.hashes.items(), *scales.items()])


def header_hash(header: StatisticsHeader) -> str:
    """Content hash of a whole file: of its header as JSON, which has the hashes of all tensors."""
    total = ContentHash()
    total.update(header.model_dump_json(exclude_defaults=True).encode())
    return total.hexdigest()


def describe(header: StatisticsHeader) -> dict[str, Any]:
    """Summary of a file for plans and manifests: its hash, those of model and adapter, data, samples, tokens."""
    return {
        "content": header_hash(header),
        "model": header.model.content,
        "adapter": header.model.adapter.content if header.model.adapter else None,
        "data": [d.model_dump(exclude_defaults=True) for d in header.data],
        "samples": header.samples,
        "tokens": header.tokens,
    }


def is_of_images(header: StatisticsHeader) -> bool:
    """True if all data are images, which have no tokens."""
    return all(d.details.get("inputs") == "images" for d in header.data)


def describe_amount(header: StatisticsHeader) -> str:
    """Amount of data in words: samples, and tokens where there are any."""
    words = f"{header.samples:,} sample" + "s" * (header.samples != 1)
    return words if is_of_images(header) else f"{words}, {header.tokens:,} token" + "s" * (header.tokens != 1)


def describe_contents(header: StatisticsHeader) -> list[str]:
    """Kinds of statistics in words: `the Fisher of 15 tensors (drawn labels)`."""
    words = [f"{len(header.grams)} Gram matrices for {len(header.places)} tensors"] if header.grams else []
    if header.fisher:
        words.append(f"the Fisher of {len(header.fisher)} tensors ({header.fisher_labels} labels)")
    return words
