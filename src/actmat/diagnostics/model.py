"""The diagnosis of a merge, the content of `report.json`: frozen, JSON-able, read strictly; see docs/formats/report.md.

Shapes: `T` experts. Every vector over experts has `T` entries, every matrix `T x T`, in the order of `experts`.
Numbers are finite; what does not apply is None, never NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from actmat.bounds import MAX_WRITTEN_VALUES, check_values, local_path, read_bytes
from actmat.errors import CheckpointError
from actmat.foreign import terminal
from actmat.system import replace_file

FORMAT: Literal[1] = 1
"""Version of the layout."""

REPORT_NAME = "report.json"

MAX_NUMBER = 1e150
"""Largest number in a report; norms of float64 tensors that are finite when squared are below."""
MAX_COUNT = 2**63
"""Largest whole number in a report: bytes and entries of anything that a disk holds are below."""


def _held(value: float) -> float:
    if abs(value) > MAX_NUMBER:
        raise ValueError(f"expected a number of at most {MAX_NUMBER:g}, found {value:g}")
    return value


Number = Annotated[float, AfterValidator(_held)]
WholeNumber = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Vector = tuple[Number, ...]
Matrix = tuple[Vector, ...]
Severity = Literal["issue", "tip"]


class _Strict:
    """Settings for reading the classes below with pydantic; they are plain dataclasses, made without it."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True, slots=True)
class ExpertRow(_Strict):
    """One expert as the recipe names it.

    `weight` is None if it differs from tensor to tensor. `residual` is weighted by energy, over all measured matrices;
    `energy_share` is its part of the squared norms of all experts.
    """

    name: str
    location: str
    kind: Literal["model", "adapter"]
    weight: Number | None
    residual: Number
    energy_share: Number


@dataclass(frozen=True, slots=True)
class MatrixRow(_Strict):
    """Measures of one matrix; docs/diagnostics.md defines every field with its equation."""

    name: str
    part: str
    layer: WholeNumber | None
    shape: tuple[WholeNumber, WholeNumber]
    norms: Vector
    snr: Vector | None
    relative_norms: Vector | None
    cosine: Matrix
    residual: Vector
    merged_norm: Number
    sum_norm: Number

    @property
    def label(self) -> str:
        """Tensor and part as one name."""
        return f"{self.name}[{self.part}]" if self.part else self.name

    @property
    def contested(self) -> float:
        """The largest residual of an expert: large where the experts conflict."""
        return max(self.residual, default=0.0)


WRITTEN = "self ("
"""Beginning of the name of data that an expert wrote itself; their number, seed and hash follow."""


@dataclass(frozen=True, slots=True)
class RivalAnswers(_Strict):
    """Answers that another merge of the same experts kept on the same inputs, and its accuracy where labels are known.

    `gained`: inputs whose answer the merge keeps and this one does not; `lost`: the other way round.
    """

    kept: WholeNumber
    gained: WholeNumber
    lost: WholeNumber
    accuracy: Number | None = None


@dataclass(frozen=True, slots=True)
class AgreementRow(_Strict):
    """Answers of a merge on inputs of one expert's task, compared with the expert's own.

    An input is `kept` if every prediction for it is the expert's: its class, or each token of its whole answer, with
    the end; of `unended` answers the first tokens are compared. `low` to `high`: 95 % interval of the share kept, None
    for few inputs. `measured`: the merge has seen the inputs. `without`: the merge that `auto` makes without inputs,
    None if it is this one or was not made; `average`: of the experts. `accuracy`: of the merge, where labels are known.
    Over all predictions: the share whose most probable class differs, and the mean of `KL(expert || merged)` in nats.
    """

    expert: str
    data: str
    inputs: Annotated[int, Field(ge=1, lt=MAX_COUNT)]
    kept: WholeNumber
    predictions: WholeNumber
    disagreement: Number
    divergence: Number
    low: Number | None = None
    high: Number | None = None
    measured: bool = False
    unended: WholeNumber = 0
    without: RivalAnswers | None = None
    average: RivalAnswers | None = None
    accuracy: Number | None = None
    expert_accuracy: Number | None = None

    @property
    def is_self_written(self) -> bool:
        """True for prompts that the expert wrote itself, which may be easier than a user's."""
        return self.data.startswith(WRITTEN)


@dataclass(frozen=True, slots=True)
class DataResidual(_Strict):
    """Distance of the merged model from one expert on the inputs of the expert's layers, see `extras.collect.on_data`.

    Residual 0: as the expert, 1: as the base; None: it changed nothing on its inputs. `matrices` have a Gram matrix.
    """

    expert: str
    statistics: str
    residual: Number | None
    matrices: WholeNumber


@dataclass(frozen=True, slots=True)
class Finding(_Strict):
    """Something that a check found; `tensors` names the first 20 of `count`. `muted`: by the recipe, or by answers."""

    code: str
    title: str
    severity: Severity
    message: str
    tensors: tuple[str, ...]
    count: WholeNumber
    muted: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(_Strict):
    """Diagnosis of a merge: measures per matrix, findings of checks.

    Args:
        source: "merge": measured while merging; "diagnose": without writing; "adapters": on the factors of adapters.
        base, out: locations, or None.
        actions: number of output tensors, or modules, by what was done with them.
        measures: in the order of the output.
        agreement: of the merged model with those experts whose inputs were given, in their order; None without inputs.
        residual_on_data: of the merged model, for those experts whose statistics were given; None without statistics.
    """

    actmat: str
    created: str
    recipe: Mapping[str, Any]
    method: str
    source: Literal["merge", "diagnose", "adapters"]
    base: str | None
    out: str | None
    experts: tuple[ExpertRow, ...]
    actions: Mapping[str, WholeNumber]
    measures: tuple[MatrixRow, ...]
    findings: tuple[Finding, ...]
    agreement: tuple[AgreementRow, ...] | None = None
    residual_on_data: tuple[DataResidual, ...] | None = None
    format: Literal[1] = FORMAT

    def __repr__(self) -> str:
        issues = ", ".join(c.code for c in self.issues) or "no issues"
        where = f" {self.out}" if self.out else ""
        what = f"{self.method} over {len(self.experts)} experts; {len(self.measures)} matrices"
        return terminal(f"<Diagnosis{where}: {what}; {issues}>")

    kind: Literal["diagnosis"] = "diagnosis"

    @property
    def issues(self) -> tuple[Finding, ...]:
        """Findings of severity "issue" that are not muted."""
        return tuple(f for f in self.findings if f.severity == "issue" and not f.muted)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"format": self.format, "kind": self.kind} | dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any], *, where: str = "the report") -> Diagnosis:
        """Read strictly: no unknown field, no missing one, no number that is not finite, no vector of another length.

        Raises:
            CheckpointError: not such a report; lists all problems.
        """
        try:
            text = data if isinstance(data, str | bytes) else json.dumps(data)
            diagnosis: Diagnosis = _reader(Diagnosis).validate_json(text)
        except ValidationError as error:
            problems = [f"{where}: {'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        else:
            problems = [f"{where}: {p}" for p in _wrong_lengths(diagnosis)]
            if not problems:
                return diagnosis
        raise CheckpointError(
            f"{where} is not a report of layout {FORMAT}: it was changed, cut off, or written by another version. Fix: "
            "make it again with actmat diagnose.",
            problems,
        )


def _wrong_lengths(diagnosis: Diagnosis) -> Iterator[str]:
    """Problems: vectors and matrices without one entry per expert."""
    n = len(diagnosis.experts)
    vectors = ("norms", "snr", "relative_norms", "residual")
    for m in diagnosis.measures:
        for field in vectors:
            value = getattr(m, field)
            if value is not None and len(value) != n:
                yield f"{field} of '{m.label}' has {len(value)} entries for {n} experts"
        if [len(row) for row in m.cosine] != [n] * n:
            yield f"cosine of '{m.label}' is not {n} x {n}"
    for field in ("agreement", "residual_on_data"):
        named = [row.expert for row in getattr(diagnosis, field) or ()]
        if named != [e.name for e in diagnosis.experts if e.name in named]:
            yield f"{field} does not name experts, each once, in their order"


def rows_from_json(rows: Sequence[Mapping[str, Any]]) -> tuple[MatrixRow, ...]:
    """Rows from the records of a run, which may come from a journal."""
    return tuple(_reader(tuple[MatrixRow, ...]).validate_json(json.dumps(rows)))


@functools.cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    """Validator; building that of reports takes 20 ms, more than most reports take to be read."""
    return TypeAdapter(kind)


def read_diagnosis(path: str | Path) -> Diagnosis:
    """Read the report at `path`, or in the directory `path`.

    Raises:
        CheckpointError: not found, or unreadable.
    """
    file = _report_file(local_path(path))
    try:
        text = read_bytes(file)
    except CheckpointError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else error.problems[0].removeprefix(f"{file}: ")
        raise CheckpointError(
            f"{file} cannot be read ({reason}). A report is written by actmat merge --diagnose, or by "
            "actmat diagnose --out."
        ) from None
    check_values(text, str(file), values=MAX_WRITTEN_VALUES)
    return Diagnosis.from_json(text, where=str(file))


def write_diagnosis(diagnosis: Diagnosis, path: str | Path) -> Path:
    """Write `report.json` to the file `path`, or into the directory `path`; whole or not at all.

    Raises:
        OSError: writing failed.
    """
    text = json.dumps(diagnosis.to_json(), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return write_whole(_report_file(path), [f"{text}\n".encode()])


def write_whole(file: Path, pieces: Iterable[bytes]) -> Path:
    """Write a file, and its folder if need be; readers see the old file or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.part")
    unfinished.unlink(missing_ok=True)  # whatever an earlier run left: a link would be written through
    with unfinished.open("xb") as out:
        out.writelines(pieces)
    replace_file(unfinished, file)
    return file


def _report_file(path: str | Path) -> Path:
    return Path(path) / REPORT_NAME if os.path.isdir(path) else Path(path)
