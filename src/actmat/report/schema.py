"""Structure of `actmat_manifest.json`: types, required fields, and parts that must agree with each other.

A manifest comes with a download, so that nothing in it is trusted: readers get it only from `read_manifest`, which
applies this schema. Unlisted fields are ignored: a later version may add some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from actmat.checkpoints.folder import shown

LONGEST_PATH = 4096


def _plain_path(path: str) -> str:
    """The path, if it is relative and stays in its folder; else ValueError."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in path or str(pure) != path:
        raise ValueError("not a relative path inside the output's folder")
    return path


def _location(path: str) -> str:
    """The path or hub id, if a system call could take it; else ValueError."""
    if "\0" in path or len(path) > LONGEST_PATH:
        raise ValueError(f"not a path: it has a null character, or more than {LONGEST_PATH} characters")
    return path


_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16,128}$")]
_Size = Annotated[int, Field(ge=0)]
_FileName = Annotated[str, Field(max_length=LONGEST_PATH), AfterValidator(_plain_path)]
_Location = Annotated[str, AfterValidator(_location)]


class _StrictRow(BaseModel):
    """Numbers, texts and lists are taken as they are, never converted."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _FileRow(_StrictRow):
    size: _Size
    hash: _Hash


class _InputFile(_StrictRow):
    path: str  # below the location, as the user gave that
    size: _Size


class _InputRow(_StrictRow):
    name: str
    location: _Location
    files: list[_InputFile] = []
    from_here: _Location | None = None
    content: _Hash
    hashes: dict[str, _Hash] | None = None
    ignored_tensors: list[str] = []


class _Expert(_StrictRow):
    """An expert in the recipe."""

    path: str
    weight: Any = 1.0  # or a value that differs from tensor to tensor, see `recipe.values`


class _Recipe(_StrictRow):
    """Fields that readers use before the recipe is checked against its own schema."""

    base: str | None = None
    experts: list[_Expert] = []
    method: str = "actmat"
    options: dict[str, Any] = {}
    output: dict[str, Any] = {}


class _Output(_StrictRow):
    content: _Hash
    files: dict[_FileName, _Size]
    side_files: dict[_FileName, _FileRow]


class _Item(_StrictRow):
    """A tensor of a model, or a module of an adapter."""

    name: str
    shape: list[_Size]
    action: Literal["merge", "average", "copy", "tie"]
    method: str | None = None


class _ModelTensor(_Item):
    out_dtype: str
    hash: _Hash
    sources: list[str] | None = None
    input_hashes: dict[str, _Hash]


class _AdapterTensor(_StrictRow):
    name: str
    shape: list[_Size]
    dtype: str
    hash: _Hash


class _Statistics(_StrictRow):
    expert: str
    location: _Location
    from_here: _Location | None = None
    content: _Hash
    removed: bool = False  # after the merge, by which they were measured


class _NoteRow(_StrictRow):
    severity: Literal["note", "warning"]
    code: str
    text: str


class _Timing(_StrictRow):
    plan: str
    reports: dict[_FileName, _FileRow] = {}


class _Manifest(_StrictRow):
    """Fields that manifests of models and of adapters have in common."""

    content: _Hash
    recipe: _Recipe
    versions: dict[str, str]
    hash: str
    experts: list[_InputRow]  # empty if a stack of layers was copied
    statistics: list[_Statistics] = []
    output: _Output
    notes: list[_NoteRow] = []
    verdict: str = ""
    timing: _Timing


class _Model(_Manifest):
    kind: Literal["model"] = "model"
    base: _InputRow
    device: str = "cpu"
    family: str | None = None
    tensors: list[_ModelTensor]


class _Adapter(_Manifest):
    kind: Literal["adapter"]
    base: _InputRow | None
    modules: list[_Item]
    tensors: list[_AdapterTensor]


def manifest_problems(manifest: Mapping[str, Any]) -> list[str]:
    """Every field that is missing, of another type, or contradicts another field, with its place; empty if none."""
    schema = _Adapter if manifest.get("kind") == "adapter" else _Model
    try:
        checked = schema.model_validate(dict(manifest))
    except ValidationError as error:
        return [f"{_place(e['loc'])}: {e['msg']}" for e in error.errors(include_url=False, include_input=False)]
    return [*_repeated(checked), *_contradictions(checked)]


def _place(location: tuple[int | str, ...]) -> str:
    """Dotted path of a field, with a bound on the length of a hostile name."""
    text = ".".join(map(str, location))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _repeated(manifest: _Model | _Adapter) -> Iterator[str]:
    tables = {"experts": [e.name for e in manifest.experts], "tensors": [t.name for t in manifest.tensors]}
    if isinstance(manifest, _Adapter):
        tables["modules"] = [m.name for m in manifest.modules]
    for field, names in tables.items():
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{field}: {shown(name)} is listed {count} times"


def _contradictions(manifest: _Model | _Adapter) -> Iterator[str]:
    labels = [e.name for e in manifest.experts]
    if len(labels) != len(manifest.recipe.experts):
        yield f"experts: {len(labels)} are listed, the recipe has {len(manifest.recipe.experts)}"
    if "base" in labels:
        yield "experts: 'base' is the name of the base"
    items = manifest.modules if isinstance(manifest, _Adapter) else manifest.tensors
    for n, item in enumerate(items):
        place = f"{'modules' if isinstance(manifest, _Adapter) else 'tensors'}.{n} ({shown(item.name)})"
        if item.action == "merge" and item.method is None:
            yield f"{place}: merged, but no method is recorded"
        if isinstance(item, _ModelTensor):
            yield from (f"{place}: {p}" for p in _input_problems(item, labels))
    if isinstance(manifest, _Adapter):
        inputs = [*manifest.experts, *([] if manifest.base is None else [manifest.base])]
        missing = [e.name for e in inputs if e.hashes is None]
        yield from (f"inputs: the hashes of {shown(n)} are missing" for n in missing)


def _input_problems(row: _ModelTensor, labels: list[str]) -> Iterator[str]:
    """Problems of the hashes of one tensor's inputs."""
    if row.action in ("merge", "average") and row.sources is None:
        yield "made from experts, but their tensors are not recorded"
    if row.sources is not None and len(row.sources) != len(labels):
        yield f"{len(row.sources)} sources are recorded, there are {len(labels)} experts"
    wanted = {"base", *(labels if row.sources is not None else ())}
    yield from (f"the hash of its input {shown(n)} is missing" for n in sorted(wanted - row.input_hashes.keys()))
