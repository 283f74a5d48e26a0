"""Write models and LoRA adapters as GGUF, with the metadata and the tokenizer of a GGUF file of the same base.

A GGUF file also contains the tokenizer, the chat template and llama.cpp's hyperparameters. They are copied from a file
that llama.cpp converted. Tensors get the names, row order and shifts of that file, and are converted one at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors
from actmat.checkpoints.model import Model
from actmat.checkpoints.writing.staging import whole_file
from actmat.errors import AlignmentError, CheckpointError, NumericalError, OutputError, RecipeError
from actmat.experts.deltas import Deltas
from actmat.experts.locate import OpenInput, fit_expert, has_factors, locate, require_model, stored_of
from actmat.experts.lora.adapter import Adapter
from actmat.extras.gguf.file import GgufFile, rows_in_file
from actmat.extras.gguf.header import GgufEntry
from actmat.extras.gguf.names import UNUSED, added, architecture_of, names_of
from actmat.identity.agreement import export_remarks
from actmat.linalg.scaling import FLOAT32_MAX

if TYPE_CHECKING:
    import numpy
    from gguf import GGUFWriter

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Output types of matrices; vectors stay float32, as in llama.cpp."""
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
OWN_KEYS = ("GGUF.", "split.", "quantize.", "general.architecture", "general.file_type", "general.type")
"""Prefixes of metadata keys that are not copied: header, split, quantization, and changed values."""
LARGEST = {"F16": 65504.0, "BF16": 3.3895e38, "Q8_0": 127 * 65504.0}
"""Largest representable entry of a type; a Q8_0 block's scale is a float16."""
LIKE = (
    "Fix: convert the base with llama.cpp's convert_hf_to_gguf.py (any type) and give that file (--like): names, "
    "metadata and tokenizer are its"
)
FIX = "give the GGUF file of the model's own base, or convert the output with llama.cpp's convert_hf_to_gguf.py"


@dataclass(frozen=True)
class _Piece:
    """One tensor to write: GGUF name, type, shape in bytes or entries, and a function that returns it."""

    name: str
    type: str
    shape: tuple[int, ...]
    make: Callable[[], numpy.ndarray[Any, Any]]


def write_gguf(located: OpenInput, out: Path, *, like: str | None = None, type: str = "bf16") -> str:
    """Write a checkpoint or a LoRA adapter as one GGUF file; returns a sentence with the number and types of tensors.

    Args:
        located: the checkpoint or adapter.
        out: file to create; must not exist.
        like: a GGUF file of the same base.
        type: type of matrices: f32, f16, bf16 or q8_0.

    Raises:
        RecipeError: `like` is missing, or the type is unsupported.
        AlignmentError: the pattern or the checkpoint lacks tensors; all are named.
        CheckpointError: the adapter cannot be read.
        NumericalError: an entry is not finite, or exceeds the type's range.
        OutputError: the file exists, or cannot be written.
    """
    if type not in TYPES:
        raise RecipeError(
            f"--type is one of {', '.join(TYPES)}; got {type!r}. Fix: write f16 or bf16, then run llama.cpp's "
            f"`llama-quantize OUT.gguf OUT-{type}.gguf {type.upper()}`."
        )
    if like is None:
        raise RecipeError(f"GGUF export needs a GGUF file of the base. {LIKE}.")
    if os.path.lexists(out):
        raise OutputError(f"{out} exists; choose another path, or remove it.")
    with _pattern(like) as (pattern, base):
        if isinstance(located, Adapter) and has_factors(located):
            if located.problems:
                raise CheckpointError(f"{located.location} cannot be read as an adapter.", located.problems)
            model: Model | Deltas = fit_expert(located, None)
            pieces, fields = _pieces_of_adapter(located, pattern, type), dict[str, Any](adapter=_alpha(located))
        else:
            model = require_model(located)
            pieces, fields = _pieces_of_model(model.tensors, pattern, type), {"file_type": FILE_TYPES[type]}
        remarks = export_remarks([("base", base), ("model", model)], FIX)
        return "\n".join((_write(out, pattern, pieces, fields), *remarks))


@contextlib.contextmanager
def _pattern(like: str) -> Iterator[tuple[GgufFile, Model]]:
    """Open the pattern, and the model that it is; only its header is read."""
    with locate(like) as located:
        stored = getattr(stored_of(located).tensors, "stored", None)
        if not isinstance(stored, GgufFile):
            raise CheckpointError(f"{like}: --like is not a GGUF file. {LIKE}.")
        yield stored, stored_of(located)


def _pieces_of_model(tensors: Tensors, pattern: GgufFile, type: str) -> list[_Piece]:
    """Every tensor of the pattern, with the model's values.

    Raises:
        AlignmentError: tensors do not match; all are listed.
    """
    header, names = pattern.gguf, names_of(pattern.gguf, pattern.location)
    pieces, problems = [], []
    for tensor in header.tensors:
        if tensor.name in UNUSED:  # computed from the config, so equal for all models of this base
            pieces.append(_Piece(tensor.name, "F32", tensor.shape, _copied(pattern, tensor)))
            continue
        name = names[tensor.name]
        spec = tensors.specs.get(tensors.aliases.get(name, name))
        if spec is None:
            problems.append(f"'{name}' ({tensor.name} in the pattern) is not in {tensors.location}")
        elif spec.shape != tensor.shape:
            problems.append(f"'{name}' is {list(spec.shape)} here and {list(tensor.shape)} in the pattern")
        elif type == "q8_0" and len(tensor.shape) > 1 and tensor.shape[-1] % 32:
            problems.append(f"'{name}' has rows of {tensor.shape[-1]}, not a multiple of q8_0's block of 32: use f16")
        else:
            stored_as = "F32" if len(tensor.shape) < 2 else TYPES[type]
            pieces.append(_piece(tensor.name, stored_as, tensor.shape, _values(tensors, spec.name, pattern, tensor)))
    tied = tensors.aliases.keys()
    extra = [n for n in tensors.specs if n not in names.values() and n not in tied and "rotary_emb" not in n]
    problems += [f"'{name}' has no counterpart in the pattern {pattern.location}" for name in extra]
    if problems:
        raise AlignmentError(
            f"{tensors.location} does not match the pattern {pattern.location}. Likely cause: a file of another "
            "base, or an output with a changed head or vocabulary. Fix: convert the output itself with llama.cpp's "
            "convert_hf_to_gguf.py",
            problems,
        )
    return pieces


def _pieces_of_adapter(adapter: Adapter, pattern: GgufFile, type: str) -> list[_Piece]:
    """Both factors of every module, with the rows of B in the pattern's order.

    Raises:
        AlignmentError: modules that a llama.cpp adapter cannot hold; all are listed.
    """
    names = {entry: name for name, entry in names_of(pattern.gguf, pattern.location).items()}
    stored = {t.name: t for t in pattern.gguf.tensors}
    pieces, problems = [], [f"'{n}' was trained in full" for n in adapter.extras]
    alpha = _alpha(adapter)
    for name, module in adapter.modules.items():
        entry = stored.get(names.get(f"{name}.weight", ""))
        if entry is None or module.kind != "linear" or module.bias is not None:
            why = "has no counterpart in the pattern" if entry is None else "is not plain LoRA of a linear layer"
            problems.append(f"'{name}' {why}")
            continue
        if tuple(module.shape) != entry.shape:
            problems.append(f"'{name}' is {list(module.shape)} here and {list(entry.shape)} in the pattern")
            continue
        factor = module.scaling * module.rank / alpha
        order = rows_in_file(pattern.gguf, entry)
        stored_as = "F16" if type == "f16" else "F32"  # factors are small, and ranks do not fill blocks
        a, b = _factor(adapter, module.a, 1.0, None), _factor(adapter, module.b, factor, order)
        pieces.append(_piece(f"{entry.name}.lora_a", stored_as, (module.rank, module.shape[1]), a))
        pieces.append(_piece(f"{entry.name}.lora_b", stored_as, (module.shape[0], module.rank), b))
    if problems:
        raise AlignmentError(
            f"{adapter.location} cannot be written as a llama.cpp adapter. Fix: merge it into its base "
            "(`actmat merge -b BASE -e ADAPTER`), and export the model",
            problems,
        )
    return pieces


def _alpha(adapter: Adapter) -> float:
    """The file's alpha: `scaling = alpha / rank` of the first module; the scalings of others are folded into B.

    Never 0, because llama.cpp reads 0 as a scaling of 1.
    """
    first = next(iter(adapter.modules.values()), None)
    return 1.0 if first is None else first.scaling * first.rank or 1.0


def _values(tensors: Tensors, name: str, pattern: GgufFile, tensor: GgufEntry) -> Callable[[], Tensor]:
    """Function that returns the tensor in file form: rows in llama.cpp's order, shift added."""

    def make() -> Tensor:
        value = tensors.read(name).to(torch.float32)
        order = rows_in_file(pattern.gguf, tensor)
        return (value if order is None else value[order]) + added(pattern.gguf, tensor.name)

    return make


def _factor(adapter: Adapter, name: str, factor: float, order: Tensor | None) -> Callable[[], Tensor]:
    def make() -> Tensor:
        value = adapter.weights.read(name).to(torch.float32)
        value = value if order is None else value[order]
        return value if factor == 1.0 else value * factor

    return make


def _copied(pattern: GgufFile, tensor: GgufEntry) -> Callable[[], Any]:
    return lambda: pattern.read(tensor.name).to(torch.float32).numpy()


def _piece(name: str, type: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> _Piece:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape, quantize

    kind = GGMLQuantizationType[type]
    stored = quant_shape_to_byte_shape(shape, kind) if type in ("BF16", "Q8_0") else shape

    def checked() -> numpy.ndarray[Any, Any]:
        value, limit = make(), LARGEST.get(type, FLOAT32_MAX)
        largest = float(value.abs().max()) if value.numel() else 0.0
        if not largest <= limit:  # NaN, too
            raise NumericalError(
                f"tensor '{name}': expected finite entries of at most {limit:g} for {type}, found {largest:g}. Fix: "
                "write bf16 or f32; for a value that is not finite, inspect the checkpoint."
            )
        return quantize(value.contiguous().numpy(), kind)

    return _Piece(name, type, tuple(stored), checked)


def _write(out: Path, pattern: GgufFile, pieces: list[_Piece], keys: Mapping[str, Any]) -> str:
    """Write a temporary file next to `out`, and rename it when complete."""
    with whole_file(out) as building:
        _fill(building, pattern, pieces, keys)
    counts = Counter(piece.type for piece in pieces)
    return f"{len(pieces)} tensors: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _fill(file: Path, pattern: GgufFile, pieces: list[_Piece], keys: Mapping[str, Any]) -> None:
    """Write the metadata, then one tensor after the other."""
    import numpy
    from gguf import GGMLQuantizationType, GGUFWriter

    with contextlib.closing(GGUFWriter(file, architecture_of(pattern.gguf, pattern.location))) as writer:
        _add_metadata(writer, pattern, keys)
        for piece in pieces:
            dtype = numpy.dtype({"F32": "float32", "F16": "float16"}.get(piece.type, "uint8"))
            size = math.prod(piece.shape) * dtype.itemsize
            writer.add_tensor_info(piece.name, piece.shape, dtype, size, GGMLQuantizationType[piece.type])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for piece in pieces:
            writer.write_tensor_data(piece.make())


def _add_metadata(writer: GGUFWriter, pattern: GgufFile, keys: Mapping[str, Any]) -> None:
    """Add the pattern's metadata for a model, or the keys that llama.cpp requires for an adapter."""
    from gguf import GGUFReader, GGUFType, GGUFValueType, Keys, LlamaFileType

    if "adapter" in keys:
        writer.add_type(GGUFType.ADAPTER)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, keys["adapter"])
        return
    writer.add_type(GGUFType.MODEL)
    writer.add_file_type(LlamaFileType[keys["file_type"]])
    for field in GGUFReader(pattern.first_file).fields.values():
        if not field.name.startswith(OWN_KEYS):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
