"""Models and data sets of the hub: one download, known by its commit.

A model is a folder or `org/name[@revision]`. Weights are taken in the format that the repository has: safetensors, or
else PyTorch's, as on the main branch of `openai/clip-vit-base-patch32`.

Of a data set only the files of the splits that are used are downloaded: SVHN's `extra` alone holds 531,131 images.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from actmat.errors import CheckpointError
from actmat_experiments.core import in_one_line
from actmat_experiments.harness.cache import file_digest

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Weight files, the first kind that a repository has; other formats (Flax, TensorFlow, ONNX) are left there."""
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configs and tokenizers."""
_LOCAL = (*WEIGHTS, *_BESIDE, "*.gguf")
"""Files of a local folder that its identity depends on."""
_CONVERTED = "refs/convert/parquet"
"""Branch on which the hub keeps Parquet files made by a data set's former script."""
_MOST_MALFORMED = 0.01

Read = TypeVar("Read")


def model_folder(location: str) -> tuple[Path, str]:
    """A model's folder and the identity of its content: the commit on the hub, or the hash of local files.

    Args:
        location: folder, or hub id `org/name[@revision]`.

    Raises:
        CheckpointError: it is neither a folder nor a model on the hub that can be reached, or it has no weights.
    """
    folder = Path(location)
    if folder.is_dir():
        return folder, file_digest(p for pattern in _LOCAL for p in folder.glob(pattern))
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repo, _, revision = location.partition("@")
    try:
        try:
            info = HfApi().model_info(repo, revision=revision or None)
        except OfflineModeIsEnabled:  # use files of an earlier download
            found = Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
        else:
            names = [sibling.rfilename for sibling in info.siblings or ()]
            found = Path(
                snapshot_download(repo, revision=info.sha, allow_patterns=[*_weights(location, names), *_BESIDE])
            )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"'{location}' is not a folder, and downloading it from the hub failed: {in_one_line(error)}. "
            "Fix: give a local folder, or check the name and the network."
        ) from error
    return found, f"{repo}@{found.name}"


def _weights(location: str, names: Sequence[str]) -> list[str]:
    """The files of the first format that is there."""
    for pattern in WEIGHTS:
        if chosen := [n for n in names if "/" not in n and Path(n).match(pattern)]:
            return chosen
    raise CheckpointError(
        f"'{location}' has no weights in a format that can be read: expected {' or '.join(WEIGHTS)}, found "
        f"{', '.join(sorted(names)) or 'no files'}."
    )


def load_splits(repo: str, config: str | None, splits: Sequence[str], revision: str | None = None) -> tuple[Any, str]:
    """Split -> rows, by the library `datasets`, and the identity of the files that were read.

    A data set that is still a script on its main branch, which `datasets` 4 and later does not run, is read from the
    hub's own conversion of it; a warning says so.

    Args:
        repo: hub id, or folder.
        config: its configuration, if it has several.
        splits: the only ones that are downloaded, where the files are Parquet.

    Raises:
        CheckpointError: the data set cannot be reached, or lacks a split.
    """
    import datasets

    try:
        try:
            builder = datasets.load_dataset_builder(repo, config, revision=revision)
            files = dict(builder.config.data_files or {})
            features = builder.info.features
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            warnings.warn(f"{repo} is a script on its main branch: its files are read from {_CONVERTED}", stacklevel=2)
            files, features = _converted_files(repo, config, splits), None
        if missing := [s for s in splits if s not in files]:
            raise CheckpointError(
                f"The data set {repo} has no split {' and '.join(map(repr, missing))}; it has {', '.join(files)}."
            )
        chosen = {split: [str(file) for file in files[split]] for split in splits}
        if all(file.endswith(".parquet") for some in chosen.values() for file in some):
            found = datasets.load_dataset("parquet", data_files=chosen, features=features)
            return found, _identity(chosen)
        found = {s: datasets.load_dataset(repo, config, split=s, revision=revision) for s in splits}
        return found, _identity(chosen)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises errors of a dozen other libraries
        raise CheckpointError(
            f"The data set {repo} could not be read ({', '.join(splits)}): "
            f"{type(error).__name__}: {in_one_line(error)}."
        ) from error


def _converted_files(repo: str, config: str | None, splits: Sequence[str]) -> dict[str, list[str]]:
    """The hub's conversion has a folder for every configuration and, in it, for every split."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(repo, revision=_CONVERTED)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    folder = config or "default"
    there = {s: sorted(n for n in names if n.startswith(f"{folder}/{s}/") and n.endswith(".parquet")) for s in splits}
    return {s: [f"hf://datasets/{repo}@{info.sha}/{n}" for n in some] for s, some in there.items() if some}


def _identity(files: dict[str, list[str]]) -> str:
    """Files of the hub are known by the commit in their address, local ones by their bytes."""
    found = []
    for split, some in files.items():
        local = [Path(f) for f in some if "://" not in f]
        found += [f"{split}:{f}" for f in some if "://" in f] + ([f"{split}:{file_digest(local)}"] if local else [])
    return "\n".join(found)


def kept_rows(rows: Sequence[Any], read: Callable[[Any], Read], where: str) -> tuple[list[Read], list[str]]:
    """Rows as `read` makes them, without malformed ones, and a line for each of those.

    Args:
        read: raises `ValueError` that describes the fault of a row.
        where: file or data set, for messages.

    Raises:
        CheckpointError: more than one row in a hundred is malformed, or none is left.
    """
    found, problems = [], []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(read(row))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            problems.append(f"row {number}: {error}")
    if not (found or problems):
        problems.append("the data set has no rows")
    check_malformed(problems, len(rows), where)
    return found, problems


def check_malformed(problems: Sequence[str], n: int, where: str) -> None:
    """Raise `CheckpointError` if more than one of a hundred rows is malformed."""
    if len(problems) > _MOST_MALFORMED * n:
        raise CheckpointError(f"{where}: {len(problems)} of {n} rows cannot be used; at most 1 % may be.", problems)
