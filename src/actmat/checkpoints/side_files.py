"""Side files: all files of a folder except the merged weights, sorted by rule into kept and left out.

A loader may ask for any small file of the folder it is given: tokenizers of many kinds (`tekken.json`), chat templates,
code, `modules.json` and the folders of sentence-transformers, configs of a pipeline's components, a license. So
everything is kept except files known to be something else: weights, another form of the whole model, training
records, files that the output writes itself, media, hidden files, and files too large to be a config.
"""

from __future__ import annotations

import fnmatch
import mimetypes
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from actmat.bounds import parse_json, read_bytes, read_object
from actmat.checkpoints.folder import ADAPTER_CONFIG, INDEX_SUFFIX, is_plain_name
from actmat.errors import CheckpointError, Note

LARGEST = 200_000_000
"""Bytes of the largest side file; the largest tokenizers take 50 MB."""
LARGEST_UNKNOWN = 10_000_000
"""The same of a file whose kind is not known, which may hold the weights in the form of another program."""
DEEPEST = 4
"""Folders below the top one that are searched."""
MOST_IN_FOLDER = 500
"""Most files in a folder of side files, subfolders included; a folder with more is taken for data."""

_SUFFIXES = """
.safetensors .bin .pt .pth .pt2 .pte .ckpt .gguf .ggml .h5 .keras .msgpack .onnx .onnx_data .npz .npy .tflite .mlmodel
.nemo .engine .pkl .pickle .joblib .distcp .tar .zip .llamafile .pb
"""
WEIGHT_SUFFIXES = tuple(_SUFFIXES.split())
"""Endings of files with weights in any format, of pickles and archives: none is a small text that a loader reads."""

_TEXTS = """
.json .jsonl .txt .text .md .rst .html .jinja .jinja2 .py .pyi .ipynb .sh .yaml .yml .toml .cfg .ini .xml .csv .tsv .gin
.model .vocab .vocabulary .bpe .codes .spm .tiktoken .trie .dic .dict .map .license .template .prompt .lock
.gz .bib .cff
"""
KNOWN_SUFFIXES = tuple(_TEXTS.split())
"""Endings of texts and of tokenizers; files without an ending, such as LICENSE, are texts too."""

OWN = frozenset({"README.md", "actmat_manifest.json", "report.json", "report.html"})
"""Top-level files that the output writes itself."""

_TRAINING = (
    "trainer_state.json",
    "*_results.json",
    "events.out.tfevents*",
    "*.log",
    "latest",
    "zero_to_fp32.py",
    "wandb",
    "runs",
)
_MEDIA = frozenset({"image", "video", "audio"})
_TYPES = mimetypes.MimeTypes()  # of the library itself: those of the machine differ

MODULES = "modules.json"
"""Names the folders of the modules of a sentence-transformers model, whose weights are their own."""
ROUTER = "router_config.json"
"""Names the folders of the modules of a sentence-transformers model that has an encoder for each kind of input."""
PIPELINE = "model_index.json"
"""Names the components of a pipeline of diffusers, each in a folder."""
SCHEDULER_CONFIG = "scheduler_config.json"
"""In the folder of a pipeline's scheduler: tells what the model was trained to predict."""


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Files of one folder, by path below it with slashes; the weights that are merged are in neither.

    Args:
        kept: to be copied, sorted.
        left_out: path of a file, or of a whole folder with a slash at its end -> why; the code is its kind.
        modules: folders of modules of sentence-transformers.
    """

    kept: tuple[str, ...] = ()
    left_out: Mapping[str, Note] = field(default_factory=dict)
    modules: tuple[str, ...] = ()


def is_weights(name: str) -> bool:
    """True for names of files with weights, of an index of them, and of a configuration that belongs to an adapter.

    >>> is_weights("model.safetensors.index.json"), is_weights("a/pytorch_model.bin"), is_weights("tekken.json")
    (True, True, False)
    """
    return name.endswith((*WEIGHT_SUFFIXES, INDEX_SUFFIX)) or (".index." in name and name.endswith(".json"))


def is_unknown(path: str) -> bool:
    """True for a file of which its name does not tell what it is: a setting, or the weights in some other form.

    >>> is_unknown("LICENSE"), is_unknown("vocab.bpe"), is_unknown("rust_model.ot")
    (False, False, True)
    """
    suffix = PurePosixPath(path).suffix.lower()
    return bool(suffix) and not suffix.endswith(KNOWN_SUFFIXES) and not is_weights(path) and not suffix[1:].isdecimal()


def is_of_architecture(name: str, whole: Collection[str] = ()) -> bool:
    """True for files that belong to the base's tensors, whichever input gives the tokenizer: config, code, modules."""
    top = name.partition("/")[0]
    of_it = (
        PurePosixPath(name).name in ("config.json", SCHEDULER_CONFIG)
        or name in (MODULES, PIPELINE)
        or name.endswith(".py")
    )
    return of_it or (top in whole and "/" in name)


def code_files(config: Mapping[str, Any], classes: str = "") -> list[str]:
    """Python files that `auto_map` of a config names; they are copied, never run.

    Args:
        config: of a model.
        classes: beginning of the names of the Auto classes.

    >>> code_files({"auto_map": {"AutoConfig": "own/repo--conf.Config", "AutoModel": "code.Model"}}, "AutoModel")
    ['code.py']
    """
    listed = config.get("auto_map")
    rows = [v for k, v in listed.items() if str(k).startswith(classes)] if isinstance(listed, Mapping) else [listed]
    named = [v for row in rows for v in (row if isinstance(row, list) else [row]) if isinstance(v, str)]
    return sorted({v.rpartition("--")[2].partition(".")[0] + ".py" for v in named})


def sort_side_files(
    sizes: Mapping[str, int], merged: Collection[str] = (), modules: Collection[str] = (), parts: Collection[str] = ()
) -> SideFiles:
    """Sort the files of a folder.

    Args:
        sizes: path below the folder -> bytes.
        merged: paths of the weights that are merged.
        modules: folders of modules of sentence-transformers.
        parts: folders of a pipeline's components. Both are kept without their weights.

    >>> found = sort_side_files({"model.safetensors": 9, "tekken.json": 5, "optimizer.pt": 9}, ["model.safetensors"])
    >>> found.kept, found.left_out["optimizer.pt"].text
    (('tekken.json',), 'weights that are not merged, or a pickle')
    """
    folders: dict[str, list[str]] = {}
    for path in sizes:
        top, slash, _ = path.partition("/")
        if slash:
            folders.setdefault(top, []).append(path)
    left_out: dict[str, Note] = {}
    for top, paths in folders.items():
        if (why := _why_not_folder(top, paths, top in parts or top in modules)) is not None:
            left_out[f"{top}/"] = why
    copied = []
    for path in sorted(set(sizes) - set(merged)):
        top, slash, _ = path.partition("/")
        if slash and f"{top}/" in left_out:
            continue
        why = _why_not_file(path, sizes[path])
        if why is None:
            copied.append(path)
        elif why.text:
            left_out[path] = why
    return SideFiles(tuple(copied), dict(sorted(left_out.items())), tuple(sorted(modules)))


def _why_not_folder(top: str, paths: list[str], is_part: bool) -> Note | None:
    """The reason why no file of a folder is kept, or None."""
    if top.startswith("."):
        return Note("note", "hidden", "hidden")
    if any(fnmatch.fnmatchcase(top, pattern) for pattern in _TRAINING):
        return Note("note", "training", "training records")
    weights = next((p for p in paths if is_weights(p)), None)
    if weights is not None and not is_part:
        return Note("note", "weights", f"a folder with weights of its own, such as {PurePosixPath(weights).name}")
    if len(paths) > MOST_IN_FOLDER:
        return Note("note", "large", f"a folder of {len(paths)} files")
    return None


def _why_not_file(path: str, size: int) -> Note | None:
    """The reason why a file is left out, without words for an index of weights; None if it is kept."""
    name = PurePosixPath(path).name
    if name.startswith("."):
        return Note("note", "hidden", "hidden")
    if path in OWN:
        return Note("note", "output", "written anew")
    if name == ADAPTER_CONFIG:
        return Note("note", "adapter", "file of an adapter, whose weights loaders would look for")
    if is_weights(name):
        return Note("note", "weights", "" if name.endswith(".json") else "weights that are not merged, or a pickle")
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in _TRAINING):
        return Note("note", "training", "training record")
    if fnmatch.fnmatchcase(name, "*quant*_config.json"):
        return Note("note", "quantization", "settings of codes, and outputs hold floats")
    kind = (_TYPES.guess_type(name)[0] or "").partition("/")[0]
    if kind in _MEDIA or name.endswith(".pdf"):
        return Note("note", "media", "an image, audio or video file")
    if size > LARGEST_UNKNOWN and is_unknown(name):
        return Note("note", "unknown", f"{size} bytes of unknown kind, maybe the weights in another form")
    if size > LARGEST:
        return Note("note", "large", f"{size} bytes, more than the {LARGEST} of a side file")
    return None


def list_tree(folder: Path | None) -> dict[str, int]:
    """Path below a local folder -> bytes, of all files down to `DEEPEST`; links to folders are not followed.

    Links to files and non-regular files count with size 0: `folder.member` judges them when they are copied.
    """
    sizes: dict[str, int] = {}
    if folder is None or not os.path.isdir(folder):
        return sizes
    for where, folders, names in os.walk(folder):
        below = os.path.relpath(where, folder)
        depth = 0 if below == "." else below.count(os.sep) + 1
        inner = [n for n in folders if depth < DEEPEST and not n.startswith(".")]
        folders[:] = sorted(n for n in inner if not os.path.islink(os.path.join(where, n)))
        for name in names:
            path = Path(where, name)
            size = path.stat().st_size if path.is_file() else 0
            sizes[path.relative_to(folder).as_posix()] = size
    return sizes


def side_files_in(sizes: Mapping[str, int], merged: Collection[str], fetch: Callable[[str], Path]) -> SideFiles:
    """The side files among files of these sizes; `fetch` returns the path of one, for tables that name folders."""
    modules = _modules(fetch(MODULES)) if MODULES in sizes else []
    if MODULES in sizes and ROUTER in sizes:
        modules += filter(is_plain_name, read_object(fetch(ROUTER)).get("types") or ())
    parts = [n for n in read_object(fetch(PIPELINE)) if not n.startswith("_")] if PIPELINE in sizes else []
    return sort_side_files(sizes, merged, modules, parts)


def _modules(path: Path) -> list[str]:
    """Folders of modules that `modules.json` names, except the top folder, which is the model itself."""
    try:
        listed = parse_json(read_bytes(path))
        paths = [str(module["path"]) for module in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected a list of modules with their paths, found something else ({error}). Likely cause: an "
            "incomplete download. Fix: fetch the file again."
        ) from None
    return [p for p in paths if is_plain_name(p)]
