"""Convert a LoRA of an image or video model between the layouts of diffusers, kohya and ComfyUI.

| layout | denoiser | text encoders | factors |
|---|---|---|---|
| diffusers | `transformer.` or `unet.`, diffusers' names | `text_encoder.`, `text_encoder_2.` | `.lora_A.weight`, `.lora_B.weight` |
| kohya | `lora_unet_`, the original code's names | `lora_te1_`, `lora_te2_` | `.lora_down.weight`, `.lora_up.weight`, `.alpha` |
| comfy | `diffusion_model.`, the original code's names | `text_encoders.clip_l.transformer.` | as kohya's |

Deltas do not change. A layer that packs several (`qkv`) gets their factors block by block,

    [q]   [B_q  0 ] [A_q]
    [k] = [ 0  B_k] [A_k]

or `B_q` over `B_k` if all share one A; the reverse takes rows of B, and the rows of A that B does not multiply by zero.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""  # noqa: E501 - a table

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorSpec, View, torch_dtype
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import CheckpointError, first_names
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterLayout, AdapterModule, Listing
from actmat.extras.diffusion.architectures import ARCHITECTURES, COMFY_MODEL, ImageArchitecture, Parts
from actmat.extras.diffusion.lora_files import adapter_of
from actmat.extras.diffusion.names import KOHYA_PREFIXES, component_of, find_modules
from actmat.extras.diffusion.recognized import find_architecture, is_denoiser, original_of, text_of

FileLayout = Literal["diffusers", "kohya", "comfy"]


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Rows of a stored module's delta that become rows of another module's delta.

    Args:
        module: stored module.
        rows: range of rows of its delta.
        first: first row in the other module.
        columns: columns of its B that are not zero there; None: all.
    """

    module: AdapterModule
    rows: range
    first: int
    columns: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """Number of columns."""
        return self.module.rank if self.columns is None else len(self.columns)


class BlockFactors(View):
    """Factors of modules assembled from pieces of stored modules.

    Args:
        sources: the stored factors; closed with this view.
        modules: name -> number of rows and pieces; all pieces are scaled to the scaling of the first.
    """

    def __init__(self, sources: Sequence[Tensors], modules: Mapping[str, tuple[int, Sequence[BlockPiece]]]) -> None:
        super().__init__(sources, modules)
        (stored,) = sources
        self._stored, self._modules = stored, modules
        self._shared = {name: self._is_shared(pieces) for name, (_, pieces) in modules.items()}
        specs = {}
        for name, (rows, pieces) in modules.items():
            a, b = (stored.specs[x] for x in (pieces[0].module.a, pieces[0].module.b))
            rank = pieces[0].rank if self._shared[name] else sum(p.rank for p in pieces)
            dtype = self._dtype(name)
            for end, shape in (("A", (rank, *a.shape[1:])), ("B", (rows, rank, *b.shape[2:]))):
                factor = f"{name}.lora_{end}.weight"
                specs[factor] = TensorSpec(factor, shape, dtype, a.file)
        self.specs = MappingProxyType(specs)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of an assembled factor."""
        out[:] = raw_bytes(self._factor(spec))[start : start + len(out)]

    def prefetch(self, names: Iterable[str]) -> None:
        """Do nothing: factors are small."""

    def _factor(self, spec: TensorSpec) -> Tensor:
        module, _, side = spec.name.removesuffix(".weight").rpartition(".")
        pieces, is_shared = self._modules[module][1], self._shared[module]
        if side == "lora_A":
            used = pieces[:1] if is_shared else pieces
            return torch.cat([self._part(p, p.module.a) for p in used]).to(torch_dtype(spec.dtype)).contiguous()
        out = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype))
        column = 0
        for piece in pieces:
            part = self._part(piece, piece.module.b).double() * (piece.module.scaling / pieces[0].module.scaling)
            rows = slice(piece.first, piece.first + len(piece.rows))
            out[rows, column : column + piece.rank] = part.to(out.dtype)
            column += 0 if is_shared else piece.rank
        return out

    def _part(self, piece: BlockPiece, stored: str) -> Tensor:
        factor = self._stored.read(stored)
        if stored == piece.module.a:
            return factor if piece.columns is None else factor[list(piece.columns)]
        rows = factor[piece.rows.start : piece.rows.stop]
        return rows if piece.columns is None else rows[:, list(piece.columns)]

    def _is_shared(self, pieces: Sequence[BlockPiece]) -> bool:
        """True if all pieces have the same A."""
        first = self._part(pieces[0], pieces[0].module.a)
        return all(
            (p.module.a, p.columns) == (pieces[0].module.a, pieces[0].columns)
            or torch.equal(first, self._part(p, p.module.a))
            for p in pieces[1:]
        )

    def _dtype(self, name: str) -> str:
        """Dtype of the first piece, or float32 if that cannot represent the other pieces after scaling."""
        _, pieces = self._modules[name]
        dtypes = {self._stored.specs[x].dtype for p in pieces for x in (p.module.a, p.module.b)}
        ratios = {p.module.scaling / pieces[0].module.scaling for p in pieces}
        if len(dtypes) == 1 and ratios == {1.0}:
            return dtypes.pop()
        return "float64" if "float64" in dtypes else "float32"


def _converted(adapter: Adapter, model: Model, listing: Listing, sources: Mapping[str, Sequence[str]]) -> Adapter:
    """The adapter in another layout.

    Args:
        adapter: as it is stored.
        model: view of its weights, with its files.
        listing: its content in the new layout.
        sources: see `Adapter.sources`.
    """
    converted = Adapter(model, adapter.config, (), listing)
    converted.origin, converted.sources = adapter, sources
    return converted


def in_layout(
    adapter: Adapter, layout: AdapterLayout, metadata: Mapping[str, str] | None = None
) -> tuple[Adapter, list[str]]:
    """The adapter with modules, names and factors in a layout, and problems, one sentence each.

    The result is closed with the adapter. kohya files with diffusers' names get the original names.
    """
    if metadata is None:
        metadata = adapter.model.folder.header
    strange = [n for n, m in adapter.modules.items() if m.kind not in ("linear", "convolution") or m.bias is not None]
    if strange := [*adapter.extras, *strange]:
        return adapter, [f"the layout holds factors of linear layers and convolutions, not {first_names(strange)}"]
    if layout == "peft" and len(adapter.parts) > 1:
        return adapter, [f"it has modules of several models ({', '.join(adapter.parts)}), but a PEFT adapter has one"]
    architecture, problem = find_architecture(adapter, metadata)
    if architecture is not None:
        return _LayoutConversion(adapter, architecture, layout).result()
    if adapter.layout == layout or problem:
        return adapter, [] if adapter.layout == layout else [problem]
    modules, problems = _renamed(adapter, layout)
    listing = dataclasses.replace(adapter.listing, modules=modules, layout=layout, find=None)
    return _converted(adapter, adapter.model, listing, {}), problems


def _renamed(adapter: Adapter, layout: AdapterLayout) -> tuple[dict[str, AdapterModule], list[str]]:
    """Modules of an unknown architecture, renamed to the layout; works only between diffusers and PEFT."""
    component = component_of(adapter.config.fields)
    if adapter.layout == "peft" and not component:
        return {}, [
            "its config does not name the pipeline component (auto_mapping.base_model_class, such as "
            f"UNet2DConditionModel), which is part of every name in the layout '{layout}'"
        ]
    if {adapter.layout, layout} != {"peft", "diffusers"}:
        known = ", ".join(a.name for a in ARCHITECTURES)
        strange = [
            n for n, m in adapter.modules.items() if not any(original_of(a, adapter.layout, m) for a in ARCHITECTURES)
        ]
        of_denoiser = [n for n in strange if is_denoiser(adapter, adapter.modules[n])]
        first = next(iter([*of_denoiser, *adapter.modules]), "")
        return {}, [
            f"its {len(adapter.modules)} modules, such as '{first}', have no name in the layout '{layout}': they are "
            f"not all of one supported architecture ({known})"
        ]
    names = {m.inside if layout == "peft" else f"{component}.{m.inside}": m for m in adapter.modules.values()}
    return {name: dataclasses.replace(m, name=name, path=m.inside) for name, m in names.items()}, []


def convert_lora(
    source: Adapter | Mapping[str, Tensor], layout: FileLayout, metadata: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The tensors of a LoRA in a layout, converted from any other.

    >>> a, b = torch.eye(2), torch.eye(6, 2)
    >>> name = "lora_unet_double_blocks_0_img_attn_qkv"
    >>> packed = {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": torch.tensor(2.0)}
    >>> for name in convert_lora(packed, "diffusers"):
    ...     print(name)
    transformer.transformer_blocks.0.attn.to_q.lora_A.weight
    transformer.transformer_blocks.0.attn.to_q.lora_B.weight

    Args:
        source: an open adapter, or the tensors of a file.
        layout: layout of the result. `kohya` and `comfy` store the scales as `alpha`; for diffusers, B is multiplied by
        them (in float32 if its dtype rounds the product).
        metadata: metadata of the file, which may name the model.

    Raises:
        CheckpointError: the file is not plain LoRA, or has modules without a name in the layout; lists all problems.
    """
    adapter = source if isinstance(source, Adapter) else adapter_of(hold_model(source), metadata or {})
    converted, problems = in_layout(adapter, layout, metadata)
    if wrong := [*adapter.problems, *problems]:
        raise CheckpointError(f"{adapter.location}: cannot be written in the layout '{layout}'.", wrong)
    out: dict[str, Tensor] = {}
    for name, module in converted.modules.items():
        a, b = (converted.weights.read(n) for n in (module.a, module.b))
        if layout == "diffusers":
            out |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": _scaled(b, module.scaling)}
        else:
            alpha = torch.tensor(module.scaling * module.rank, dtype=torch.float32)
            out |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": alpha}
    return out


def _scaled(b: Tensor, scaling: float) -> Tensor:
    exact = b.double() * scaling
    rounded = exact.to(b.dtype)
    return rounded if torch.equal(rounded.double(), exact) else exact.to(torch.promote_types(b.dtype, torch.float32))


class _LayoutConversion:
    """Pieces of every module of an adapter in another layout, and problems."""

    def __init__(self, adapter: Adapter, architecture: ImageArchitecture, layout: AdapterLayout) -> None:
        self._adapter, self._of, self._layout = adapter, architecture, layout
        self._pieces: dict[str, list[BlockPiece]] = {}
        self._rows: dict[str, int] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self.problems: list[str] = []

    def result(self) -> tuple[Adapter, list[str]]:
        """The adapter in the new layout, and problems."""
        adapter, layout = self._adapter, self._layout
        for module in adapter.modules.values():
            if is_denoiser(adapter, module):
                self._add(module)
            else:
                self._add_text(module)
        if self.problems:
            return adapter, self.problems
        weights = BlockFactors([adapter.weights], {n: (self._rows[n], pieces) for n, pieces in self._pieces.items()})
        modules = {name: self._module(name, weights) for name in self._pieces}
        change = "renamed" if adapter.layout == layout else f"converted from the layout of {adapter.layout} to {layout}"
        notes = (*adapter.listing.notes, f"{change}, as an adapter of {self._of.name}")
        find = find_modules if layout == "kohya" else None
        listing = dataclasses.replace(adapter.listing, modules=modules, layout=layout, find=find, notes=notes)
        sources: dict[str, list[str]] = {}
        for name, pieces in self._pieces.items():
            stored = [p.module for p in pieces]
            sources[f"{name}.lora_A.weight"] = [m.a for m in stored]
            sources[f"{name}.lora_B.weight"] = [n for m in stored for n in (m.b, m.alpha) if n is not None]
        return _converted(adapter, dataclasses.replace(adapter.model, tensors=weights), listing, sources), []

    def _module(self, name: str, weights: Tensors) -> AdapterModule:
        first = self._pieces[name][0].module
        part, path = self._places[name]
        a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
        return AdapterModule(
            name, first.kind, a, b, weights.specs[a].shape[0], first.scaling, (self._rows[name], *first.shape[1:]),
            first.kernel, part=part, path=path,
        )  # fmt: skip

    def _add(self, module: AdapterModule) -> None:
        found = original_of(self._of, self._adapter.layout, module)
        assert found is not None, "the architecture has all names"
        original, position = found
        parts = self._of.originals[original]
        rows, columns = module.shape
        heights = [n * columns for n in parts.rows] or [rows]
        expected = sum(heights) if position < 0 else heights[position]
        if rows != expected:
            self.problems.append(
                f"module '{module.name}' is {rows} x {columns}; expected {expected} rows in a model of "
                f"{self._of.name}. Likely cause: another architecture with the same names"
            )
            return
        swaps = parts.is_swapped and rows == 2 * columns
        pieces = [BlockPiece(module, range(rows), 0)]
        if self._is_original:
            start = sum(heights[:position]) if position > 0 else 0
            pieces = [BlockPiece(module, range(rows), start)]
            if swaps and position >= 0:
                pieces = _swapped(module)
            self._put(*self._original_name(original), sum(heights), pieces)
        elif position >= 0:
            self._put(*self._diffusers_name(parts.paths[position]), rows, pieces)
        elif len(parts.paths) == 1:
            self._put(*self._diffusers_name(parts.paths[0]), rows, _swapped(module) if swaps else pieces)
        else:
            self._split(module, parts, heights)

    @property
    def _is_original(self) -> bool:
        """True if the target names are those of the original code."""
        return self._layout == "comfy" or (self._layout == "kohya" and not self._of.kohya_is_diffusers)

    def _split(self, module: AdapterModule, parts: Parts, heights: Sequence[int]) -> None:
        b = self._adapter.weights.read(module.b)
        starts = [sum(heights[:i]) for i in range(len(heights))]
        live = [(b[s : s + h] != 0).flatten(2).any(dim=2).any(dim=0) if b.ndim > 2 else (b[s : s + h] != 0).any(dim=0)
                for s, h in zip(starts, heights, strict=True)]  # fmt: skip
        has_any = any(bool(x.any()) for x in live)
        for path, start, height, own in zip(parts.paths, starts, heights, live, strict=True):
            columns = tuple(own.nonzero().flatten().tolist()) if has_any else tuple(range(module.rank))
            if columns:
                kept = None if len(columns) == module.rank else columns
                self._put(
                    *self._diffusers_name(path), height, [BlockPiece(module, range(start, start + height), 0, kept)]
                )

    def _add_text(self, module: AdapterModule) -> None:
        place = text_of(self._of, self._adapter.layout, module)
        assert place is not None, "the architecture has all names"
        text, path = place
        rows = [BlockPiece(module, range(module.shape[0]), 0)]
        if self._layout == "kohya":
            flat = path.replace(".", "_")
            self._put(text.kohya + flat, KOHYA_PREFIXES[text.kohya], flat, module.shape[0], rows)
        elif self._layout == "peft":
            self._put(path, "", path, module.shape[0], rows)
        else:
            prefix = text.comfy if self._layout == "comfy" else f"{text.component}."
            self._put(prefix + path, prefix.rstrip("."), path, module.shape[0], rows)

    def _original_name(self, original: str) -> tuple[str, str, str]:
        if self._layout == "comfy":
            return COMFY_MODEL + original, COMFY_MODEL.rstrip("."), original
        flat = original.replace(".", "_")
        return f"lora_unet_{flat}", "unet", flat

    def _diffusers_name(self, path: str) -> tuple[str, str, str]:
        if self._layout == "kohya":
            flat = path.replace(".", "_")
            return f"lora_unet_{flat}", "unet", flat
        if self._layout == "peft":
            return path, "", path
        return f"{self._of.component}.{path}", self._of.component, path

    def _put(self, name: str, part: str, path: str, rows: int, pieces: Sequence[BlockPiece]) -> None:
        known = self._pieces.setdefault(name, [])
        taken = {r for p in known for r in (p.first,)}
        if any(p.first in taken for p in pieces):
            self.problems.append(f"modules '{known[0].module.name}' and '{pieces[0].module.name}' would both be named "
            f"'{name}'")  # fmt: skip
        known += pieces
        self._rows[name], self._places[name] = rows, (part, path)


def _swapped(module: AdapterModule) -> list[BlockPiece]:
    """The rows of a module with its halves exchanged."""
    half = module.shape[0] // 2
    return [BlockPiece(module, range(half, 2 * half), 0), BlockPiece(module, range(half), half)]
