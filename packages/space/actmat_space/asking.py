"""A visitor's wish: adapters by name, checked on the hub before anything of them is downloaded.

Only repositories of the hub are read, never a path of this machine; only safetensors, never a pickle.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LORA_FILES
from actmat.checkpoints.header import PREFIX_BYTES, header_length, read_header
from actmat.checkpoints.hub import HubRepository, open_repository
from actmat.errors import CheckpointError, Problems, RecipeError, format_size
from actmat.methods import all_methods
from actmat_space.limits import Limits

ADDRESS = re.compile(
    r"(?:https://huggingface\.co/|hf://)?(?P<repo>[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)"
    r"(?:(?:@|/tree/)(?P<revision>[A-Za-z0-9_./-]+))?/?"
)
LONGEST_TEXT = 10_000
"""Characters of the list of adapters."""
HEADER_BYTES_PER_TENSOR = 2_000
"""Bytes of a header that a tensor may take: its name and about 100 bytes. A longer header is not read."""
SMALL = {ADAPTER_CONFIG: 1_000_000, "README.md": 4_000_000}
"""Files that are read besides the weights, and the largest size of each."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Named:
    """An adapter that the visitor names, with its weight."""

    repo: str
    revision: str | None
    weight: float

    @property
    def text(self) -> str:
        """As it is written."""
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Found:
    """An adapter on the hub at a commit: bytes that are downloaded, and tensors."""

    named: Named
    commit: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Form:
    """What a visitor fills in.

    Args:
        adapters: one per line, see `parse_adapters`.
        method: one of `methods()`.
        rank: of the merged adapter; 0: exact.
        scale: factor of the merged delta.
        any_base: whether adapters may name different copies of one base.
    """

    adapters: str
    method: str = AUTO
    rank: int = 0
    scale: float = 1.0
    any_base: bool = False


def methods() -> list[str]:
    """Names of the methods that merge adapters on their factors and need nothing else; `auto` first.

    >>> methods()[:2], "ties" in methods(), "regmean" in methods()
    (['auto', 'average'], False, False)
    """
    fit = (m for m in all_methods() if m.lowrank is not None and not m.needs_statistics)
    return [AUTO, *(m.name for m in fit if "statistics" not in m.needs)]


def parse_adapters(text: str, limits: Limits) -> list[Named]:
    r"""The adapters of a list, a line each: `org/name`, `org/name@revision` or the address of its page, then a weight.

    >>> parse_adapters("org/math 0.7\norg/code@v2", Limits())[1]
    Named(repo='org/code', revision='v2', weight=1.0)

    Raises:
        RecipeError: lists every line that is none, or the number of adapters does not fit.
    """
    if len(text) > LONGEST_TEXT:
        raise RecipeError(f"The list of adapters has {len(text)} characters; at most {LONGEST_TEXT} are read.")
    lines = [line.split() for line in text.splitlines() if line.strip()]
    found, problems = [], []
    for words in lines:
        match = ADDRESS.fullmatch(words[0])
        weight = _number(words[1]) if len(words) == 2 else 1.0
        if match is None or len(words) > 2 or weight is None or ".." in words[0]:
            problems.append(
                "expected org/name or org/name@revision of an adapter on the hub, then its weight if it has one, found "
                f"'{' '.join(words)[:200]}'"
            )
        else:
            found.append(Named(match["repo"], match["revision"], weight))
    if problems:
        raise RecipeError("The list of adapters is not valid.", problems)
    if not 2 <= len(found) <= limits.max_adapters:
        raise RecipeError(f"Expected 2 to {limits.max_adapters} adapters, one per line, found {len(found)}.")
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def look_up(named: Sequence[Named], limits: Limits) -> list[Found]:
    """Find the adapters on the hub: listings and headers only, in two requests each at most.

    Raises:
        CheckpointError: one is missing, is no adapter, or all are too large together; carries all problems.
    """
    problems, opened = Problems(), []
    for one in named:
        with problems.noted():
            repository = open_repository(one.repo, one.revision)
            opened.append((one, repository, _weights(repository, one.text)))
    problems.check()
    found = [Found(one, repository.commit, _nbytes(repository, name), 0) for one, repository, name in opened]
    total = sum(f.nbytes for f in found)
    if total > limits.max_bytes:
        sizes = [f"{f.named.text}: {format_size(f.nbytes)}" for f in found]
        raise CheckpointError(
            f"The adapters have {format_size(total)} together, more than this space merges, "
            f"{format_size(limits.max_bytes)}. Nothing was downloaded. Fix: fewer or smaller adapters, or a space of "
            "your own with a larger ACTMAT_SPACE_MAX_BYTES.",
            sizes,
        )
    left = limits.max_tensors
    for number, (one, repository, name) in enumerate(opened):
        with problems.noted():
            count = _count(repository, name, one.text, left, limits)
            found[number] = replace(found[number], tensors=count)
            left -= count
    problems.check()
    return found


def _weights(repository: HubRepository, text: str) -> str:
    """Name of the adapter's file of weights.

    Raises:
        CheckpointError: it has none that is read here.
    """
    names = [n for n in repository.files if "/" not in n]
    safetensors = [n for n in names if n.endswith(".safetensors")]
    if ADAPTER_CONFIG in names:
        full = [n for n in safetensors if n != ADAPTER_WEIGHTS[0]]
        if ADAPTER_WEIGHTS[0] in names and not full:
            return ADAPTER_WEIGHTS[0]
        if full:
            raise CheckpointError(f"{text}: expected an adapter, found a full model next to it ({full[0]}). Fix: a "
                                  "repository with the adapter only.")  # fmt: skip
    elif "config.json" not in names and "model_index.json" not in names:
        if LORA_FILES[0] in safetensors:
            return LORA_FILES[0]
        if len(safetensors) == 1 and "lora" in safetensors[0].lower():
            return safetensors[0]
    if pickled := [n for n in names if n in (ADAPTER_WEIGHTS[1], LORA_FILES[1])]:
        raise CheckpointError(f"{text}: expected safetensors, found {pickled[0]}, a pickle, which may run code when it "
                              "is opened. Fix: save the adapter again with a recent PEFT, or "
                              "save_pretrained(..., safe_serialization=True).")  # fmt: skip
    shown = ", ".join(sorted(names)[:6]) or "no file"
    raise CheckpointError(f"{text}: expected an adapter ({ADAPTER_CONFIG} and {ADAPTER_WEIGHTS[0]}, or one LoRA file), "
                          f"found {shown}. Likely cause: a full model; this space merges adapters only.")  # fmt: skip


def _nbytes(repository: HubRepository, weights: str) -> int:
    """Bytes of the files that a merge reads.

    Raises:
        CheckpointError: a file besides the weights is far larger than such files are.
    """
    for name, most in SMALL.items():
        if name in repository.files and repository.files[name].size > most:
            raise CheckpointError(f"{repository.location}: {name} has {format_size(repository.files[name].size)}, "
                                  f"expected at most {format_size(most)}. Fix: shorten it.")  # fmt: skip
    return sum(repository.files[n].size for n in (weights, *SMALL) if n in repository.files)


def _count(repository: HubRepository, name: str, text: str, left: int, limits: Limits) -> int:
    """Tensors in a file, from its header.

    Raises:
        CheckpointError: it has more than are `left`.
    """
    too_many = (
        f"{text}: {name} has more tensors than this space merges, {limits.max_tensors} of all adapters together. Fix: "
        "fewer adapters, or a space of your own with a larger ACTMAT_SPACE_MAX_TENSORS."
    )
    read_at, size = repository.read_remote(name)
    label = f"{text}: {name}"
    if header_length(read_at(0, min(PREFIX_BYTES, size)), size, file=label) > left * HEADER_BYTES_PER_TENSOR:
        raise CheckpointError(too_many)
    count = len(read_header(read_at, size, file=label).specs)
    if count > left:
        raise CheckpointError(too_many)
    return count


def recipe_fields(form: Form, found: Sequence[Found]) -> dict[str, Any]:
    """Arguments of `actmat.plan` and `actmat.merge` for adapters at their commits.

    Raises:
        RecipeError: a method that is not offered.
    """
    if form.method not in methods():
        raise RecipeError(f"Expected one of the methods {', '.join(methods())}, found '{form.method[:100]}'.")
    experts = [
        {"path": f"hf://{f.named.repo}@{f.commit}", "name": label, "weight": f.named.weight}
        for f, label in zip(found, _labels(found), strict=True)
    ]
    fields: dict[str, Any] = {"experts": experts, "method": form.method}
    fields |= {"rank": form.rank} if form.rank else {}
    fields |= {"scale": form.scale} if form.scale != 1.0 else {}
    return fields | ({"any_base": True} if form.any_base else {})


def _labels(found: Sequence[Found]) -> Iterator[str]:
    """A short name for each adapter: that of its repository, with the owner where two have the same."""
    names = Counter(f.named.repo.partition("/")[2] for f in found)
    seen: Counter[str] = Counter()
    for f in found:
        owner, _, name = f.named.repo.partition("/")
        label = name if names[name] == 1 else f"{owner}-{name}"
        seen[label] += 1
        yield label if seen[label] == 1 else f"{label}-{seen[label]}"


def form_of(fields: Mapping[str, Any]) -> Form:
    """The form in a job, which came through JSON."""
    return Form(**fields)
