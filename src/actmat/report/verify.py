"""Check a merged model, in a folder or at a URL, and its inputs against the manifest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from actmat.bounds import is_url
from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import HASH_NAME
from actmat.checkpoints.marks import with_marks
from actmat.checkpoints.memory import LABEL
from actmat.checkpoints.model import Model
from actmat.checkpoints.remote import storage_of
from actmat.checkpoints.untied import untie
from actmat.checkpoints.writing.listed import MANIFEST_NAME, OutputFiles
from actmat.engine.content import TensorBytes, content_hash
from actmat.errors import CheckpointError, MergeError
from actmat.experts.locate import OpenInput, locate_in, stored_of, token_tables
from actmat.experts.lora.adapter import Adapter
from actmat.experts.restacked import in_layout_of
from actmat.layout.ties import tied_heads
from actmat.recipe.vocabulary import Vocabulary, vocabulary_aligner
from actmat.report.manifest import expert_hashes, input_location, manifest_content, read_manifest
from actmat.report.words import plural
from actmat.statistics.header import header_hash
from actmat.statistics.store import open_statistics

VERSIONING = frozenset({".git", ".gitattributes", ".gitignore", ".cache", ".huggingface"})
"""Files and folders at the top of the output that git and clients of hubs add and change."""

HashProgress = Callable[[str, int], None]


class Comparison(Protocol):
    """Comparison of an output with the sum that it should be."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Differences that rounding does not explain."""

    def lines(self) -> Sequence[str]:
        """The comparison in words."""

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome of `verify`.

    Args:
        tensors: number of output tensors that were hashed.
        inputs: names of the inputs that were checked, statistics of experts included.
        problems: every difference found.
        unchecked: parts of the output and of its inputs that were not checked, each with the reason.
        files: number of the output's other files that were hashed.
        of_files: file of the output -> its difference, which is among `problems`.
        added: comparison with the sum of base and deltas, if it was requested; its problems are among `problems`.
    """

    tensors: int
    inputs: tuple[str, ...]
    problems: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    files: int = 0
    of_files: Mapping[str, str] = field(default_factory=dict)
    added: Comparison | None = None

    def __repr__(self) -> str:
        verdict = "intact" if self.ok else plural(len(self.problems), "difference")
        return f"<Verification: {verdict}; {self.tensors} tensors, {self.files} files, {len(self.inputs)} inputs>"

    @property
    def ok(self) -> bool:
        """True if no difference was found."""
        return not self.problems


def verify(
    out: str | Path,
    *,
    inputs: bool = True,
    against: Sequence[str | Path] = (),
    compare: Callable[[OpenInput, ManifestInputs, Sequence[OpenInput]], Comparison] | None = None,
    progress: HashProgress = lambda name, nbytes: None,
) -> Verification:
    """Hash every tensor and file of the output, and its inputs, again and compare with the manifest.

    Args:
        out: directory of a merged model, or its URL.
        inputs: also check base and experts, if they can still be found.
        against: adapters (or checkpoints), one per expert of the merge and in their order: every tensor is compared
            with `W_0 + sum_t c_t D_t`, computed again in float64.
        compare: makes this comparison.
        progress: called with a tensor's name and size after it was hashed.

    Raises:
        CheckpointError: no manifest, a damaged one, the output is not a readable checkpoint, or not a sum of deltas.
    """
    output = storage_of(str(out)).open_output(str(out)) if is_url(out) else OutputFiles(Path(out))
    directory, location = output.manifest_folder, str(out)
    manifest = read_manifest(directory)
    if manifest["hash"] != HASH_NAME:
        used = repr(manifest["hash"])[:80]
        raise CheckpointError(f"{location}: hashed with {used}; this version of actmat checks {HASH_NAME}.")
    with contextlib.ExitStack() as stack:
        merged = locate_in(stack, location)
        problems = _form_problems(stored_of(merged).specs, manifest)
        expected = {r["name"]: r["hash"] for r in manifest["tensors"]}
        problems += _compare(stored_of(merged).tensors, expected, "the output", progress)
        if manifest["content"] != manifest_content(manifest):
            problems.append("the manifest was edited: it does not match its own content hash")
        files = {**manifest["output"]["side_files"], **manifest["timing"].get("reports", {})}
        of_files = _file_problems(output, manifest, files)
        problems += of_files.values()
        versioning = sorted(VERSIONING & {n.split("/")[0] for n in output.names()})
        unchecked = [f"{name} of the output: git and hubs change it" for name in versioning]
        read_from, checked = ManifestInputs(stack, manifest, directory), list[str]()
        if inputs:
            unchecked += _unchecked_inputs(manifest)
            held = [label for label, place in read_from.places.items() if place.startswith(LABEL)]
            unchecked += [f"input '{label}': was in memory" for label in held]
            checked = _check_inputs(read_from, directory, problems, progress)
        else:
            unchecked.append(f"inputs {', '.join(read_from.places)}: not requested")
        added = None
        if against and compare is not None:
            added = compare(merged, read_from, [locate_in(stack, e) for e in against])
    problems += added.problems if added is not None else ()
    return Verification(len(expected), tuple(checked), tuple(problems), tuple(unchecked), len(files), of_files, added)


def _check_inputs(inputs: ManifestInputs, directory: Path, problems: list[str], progress: HashProgress) -> list[str]:
    """Compare all inputs with their recorded hashes; returns the names of the checked ones."""
    checked = []
    for label, place in inputs.places.items():
        if place.startswith(LABEL):
            continue
        try:
            stored, expected = inputs.as_read(label), inputs.expected(label)
            problems += _compare(stored.tensors, expected, f"input '{label}' ({place})", progress, partial=True)
            checked.append(label)
        except MergeError as error:
            problems.append(f"input '{label}' cannot be checked: {error.problems[0]}")
        except OSError as error:
            problems.append(f"input '{label}' cannot be checked: {place}: {error.strerror}")
    for row in _kept_statistics(inputs.manifest):
        differences = list(_statistics_problems(row, input_location(row, directory), progress))
        problems += differences
        checked += [] if differences else [f"statistics of {row['expert']}"]
    return checked


def _kept_statistics(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of statistics that were not removed after the merge that measured them."""
    return [row for row in manifest.get("statistics", ()) if not row.get("removed")]


def _read_from_base(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Name and hash of all tensors that were read from the base."""
    if manifest["base"].get("hashes") is not None:
        return dict(manifest["base"]["hashes"])
    return {r["name"]: r["input_hashes"]["base"] for r in manifest["tensors"]}


def _file_problems(
    output: OutputFiles, manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Missing, extra and changed files of the output, and what differs."""
    weights = manifest["output"]["files"]
    problems = {}
    for name, size in {**weights, **{n: f["size"] for n, f in files.items()}}.items():
        try:
            actual = output.size(name)
            if actual != size:
                problems[name] = f"file '{name}' of the output has {actual} bytes, the merge wrote {size}"
            elif name in files and output.content(name) != files[name]["hash"]:
                problems[name] = f"file '{name}' of the output has changed since the merge"
        except CheckpointError as error:
            problems[name] = f"file '{name}' of the output: {error.problems[0]}"
        except OSError as error:
            problems[name] = f"file '{name}' of the output cannot be read: {error.strerror}"
    known = {MANIFEST_NAME, *weights, *files}
    extra = [n for n in output.names() if n not in known and n.split("/")[0] not in VERSIONING]
    return problems | {n: f"the output has an extra file '{n}'" for n in extra}


def _unchecked_inputs(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Parts of the inputs that no hash covers."""
    for entry in (manifest["base"], *manifest["experts"]):
        if entry is not None and (ignored := entry.get("ignored_tensors")):
            yield f"{len(ignored)} tensor(s) of input '{entry['name']}': the merge did not read them"
    if len(_kept_statistics(manifest)) < len(manifest.get("statistics", ())):
        yield "statistics of inputs: the merge measured and removed them"
    if manifest["base"] is None and (base := manifest["recipe"].get("base")):
        yield f"base ({base}): the merge read only its config"


class ManifestInputs:
    """The inputs of a merge as it read them: in the base's layout, rows in the order of its vocabulary.

    Args:
        stack: closes them.
        manifest: of the output.
        out: its folder.

    Attributes:
        output: fields of the recipe's output.
        places: name of every input -> its present location.
    """

    def __init__(self, stack: contextlib.ExitStack, manifest: Mapping[str, Any], out: Path) -> None:
        self._stack, self.manifest = stack, manifest
        self.output = manifest["recipe"].get("output", {})
        entries = [("base", manifest["base"])] if manifest["base"] is not None else []
        entries += [(e["name"], e) for e in manifest["experts"]]
        self.places = {label: input_location(entry, out) for label, entry in entries}
        self._found: dict[str, OpenInput] = {}

    def expected(self, label: str) -> dict[str, str]:
        """Stored name -> hash of all that was read."""
        return _read_from_base(self.manifest) if label == "base" else expert_hashes(self.manifest, label)

    def as_read(self, label: str) -> Model:
        """The tensors of an input.

        Raises:
            MergeError: it cannot be opened, or not be read in this form.
        """
        located = self.located(label)
        if isinstance(located, Adapter) and label not in self._aligned:
            return located.model
        stored = stored_of(located)
        if self.output.get("vocabulary") is not None:
            return self._with_heads(self._aligned["base"]) if label == "base" else self._aligned[label]
        if label == "base":
            return self._with_heads(stored)
        if "base" not in self.places or all(name in stored.specs for name in self.expected(label)):
            return stored
        return in_layout_of(stored_of(self.located("base")), stored)

    def located(self, label: str) -> OpenInput:
        """An input at its present location."""
        if label not in self._found:
            self._found[label] = locate_in(self._stack, self.places[label])
        return self._found[label]

    @functools.cached_property
    def _aligned(self) -> Mapping[str, Model]:
        if self.output.get("vocabulary") is None:
            return {}
        vocabulary = Vocabulary.model_validate(self.output["vocabulary"])
        inputs = {label: self.located(label) for label in self.places}
        tables = {label: t for label, i in inputs.items() if label != "base" and (t := token_tables(i)) is not None}
        base, experts, _ = vocabulary_aligner()(stored_of(inputs["base"]), tables, vocabulary)
        return {"base": base, **experts}

    def _with_heads(self, base: Model) -> Model:
        """The base, with copies of its token table for output heads that the merge untied."""
        read = {n: TensorSpec(n, (), "", "") for n in self.expected("base") if n not in base.specs}
        heads = tied_heads(read, base.specs, base.config)
        if heads or not read:
            return untie(base, heads) if heads else base
        experts = {n: self.located(n) for n in self.places if n != "base"}
        return with_marks(base, {n: expert for n, expert in experts.items() if isinstance(expert, Model)})


def _form_problems(specs: Mapping[str, TensorSpec], manifest: Mapping[str, Any]) -> list[str]:
    """Tensors of the output that have another shape or dtype than they were written with."""
    problems = []
    for row in manifest["tensors"]:
        spec, dtype = specs.get(row["name"]), row.get("out_dtype", row.get("dtype"))
        if spec is not None and (list(spec.shape), spec.dtype) != (row["shape"], dtype):
            problems.append(
                f"tensor '{row['name']}' of the output is {spec.dtype} {list(spec.shape)}, the merge wrote {dtype} "
                f"{row['shape']}"
            )
    return problems


def _statistics_problems(row: Mapping[str, Any], location: str, progress: HashProgress) -> Iterator[str]:
    """Differences of an expert's statistics from those that were read: their header, and the bytes that it hashes."""
    what = f"statistics of expert '{row['expert']}' ({location})"
    try:
        with open_statistics(location) as statistics:
            if header_hash(statistics.header) != row["content"]:
                yield f"{what} differ from those that the merge read"
            else:
                yield from _compare(statistics, statistics.header.tensor_hashes(), what, progress)
    except MergeError as error:
        yield f"{what} cannot be checked: {error.problems[0]}"
    except OSError as error:
        yield f"{what} cannot be checked: {error.strerror}"


def _compare(
    tensors: TensorBytes, expected: Mapping[str, str], what: str, progress: HashProgress, *, partial: bool = False
) -> list[str]:
    problems = [f"{what} lacks tensor '{n}'" for n in expected if n not in tensors.specs]
    if not partial:
        problems += [f"{what} has an extra tensor '{n}'" for n in tensors.specs if n not in expected]
    for name, spec in tensors.specs.items():
        if name not in expected:
            continue
        if content_hash(tensors, name) != expected[name]:
            problems.append(f"tensor '{name}' of {what} ({spec.file}) has changed since the merge")
        progress(name, spec.nbytes)
    return problems
