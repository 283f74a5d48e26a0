"""Files of LyCORIS and of kohya's trainers with LoHa, LoKr, (IA)^3 or DoRA, also mixed with plain factors.

    delta = alpha / r * (W1a W1b) o (W2a W2b)         LoHa; r: rows of W1b
    delta = alpha / r * W1 (x) W2                     LoKr; r: rows of W1b or W2b; scale 1 where both are whole
    delta = alpha / r * B A                           plain factors; with `lora_mid`, a core of a convolution's kernel
    delta = diag(l) W_0, or W_0 diag(l)               (IA)^3; the buffer `on_input` says which
    W = m * (W_0 + delta) / ||W_0 + delta||           where `dora_scale` m is stored; the norm of each output

Module names have underscores for dots, which only the base resolves, or are ComfyUI's. `alpha` is a tensor of the
module; if it is missing or 0, the scale is 1.

Scales are those of LyCORIS's forward pass, which training uses; its `get_merged_weight` (4.1.3) multiplies the deltas
of LoHa and LoKr by `alpha / r` twice.

Source: Yeh et al. (https://arxiv.org/abs/2309.14859); KohakuBlueleaf/LyCORIS 4.1, `modules`, `functional`.

Shapes: `O` rows and `I` columns of the logical delta, a kernel flattened into `I`; `P` rows that are wanted, `R` rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorSpec
from actmat.checkpoints.keys import Keys
from actmat.checkpoints.model import Model
from actmat.checkpoints.source import Source
from actmat.experts.changes.base import Change, Content
from actmat.experts.changes.deltas import fit_changes
from actmat.experts.deltas import AdapterFamily, Deltas
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.fitting import is_absent
from actmat.experts.lora.modules import unreadable
from actmat.extras.adapters.groups import Decomposed, Group, OwnDelta
from actmat.extras.adapters.ia3 import Scaled
from actmat.extras.adapters.loha import loha_change
from actmat.extras.adapters.lokr import lokr_change
from actmat.extras.diffusion.architectures import COMFY_MODEL
from actmat.extras.diffusion.lora_files import adapter_of, read_alpha
from actmat.extras.diffusion.metadata import metadata_notes
from actmat.extras.diffusion.names import KOHYA_PREFIXES, find_flat_names

_ROLES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "lokr_w1", "lokr_w1_a",
          "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "lora_down", "lora_up", "lora_mid", "on_input",
          "weight", "alpha", "dora_scale")  # fmt: skip
_OTHERS = {
    "full": ("diff", "diff_b"),
    "train_norm": ("w_norm", "b_norm"),
    "diag-oft or boft": ("oft_blocks", "rescale", "oft_diag"),
    "glora": ("a1", "a2", "b1", "b2", "bm"),
    "tlora": ("q_layer", "p_layer", "lambda_layer"),
    "lokr with a core of its first factor": ("lokr_t1",),
}
TENSORS = Keys(_ROLES, {}, {role: f"is of the algorithm '{a}'" for a, roles in _OTHERS.items() for role in roles})
"""Suffixes of a module's tensors; `.weight` may follow."""
_PARTS = {**KOHYA_PREFIXES, COMFY_MODEL: "unet"}
"""Beginning of a module's name -> component of a pipeline."""
_MODULE = rf"(?:{'|'.join(KOHYA_PREFIXES)})[^.]+|{re.escape(COMFY_MODEL)}.+?"
_NAME = re.compile(rf"(?P<module>{_MODULE})\.(?P<role>{'|'.join(_ROLES)})(?P<leaf>\.weight)?")
_OWN = re.compile(rf"(?:{_MODULE})\.(?:hada_|lokr_|dora_scale|on_input|lora_mid)")
_NEEDS_BASE = "its modules are named with underscores for dots, which only the base resolves"


@dataclass(frozen=True)
class LycorisModule:
    """One module of a file.

    Args:
        group: tensors of the module.
        part: component of a pipeline; `path`: name inside it, with underscores.
        family: LoHa, LoKr, (IA)^3 or LoRA.
    """

    group: Group
    part: str
    path: str
    family: str

    @property
    def words(self) -> str:
        """Name of the family for messages."""
        return f"{self.family} with DoRA's magnitudes" if "dora_scale" in self.group.names else self.family


def lycoris_modules(specs: Mapping[str, TensorSpec]) -> tuple[list[LycorisModule], list[str]]:
    """Modules of a file from its header, and problems.

    >>> spec = TensorSpec("lora_unet_mid_block_fc.hada_w1_a", (4, 2), "float32", "")
    >>> modules, _ = lycoris_modules({spec.name: spec})
    >>> modules[0].family, modules[0].part, modules[0].path
    ('LoHa', 'unet', 'mid_block_fc')
    """
    groups: dict[str, dict[str, str]] = {}
    problems = []
    for name, spec in specs.items():
        match = _NAME.fullmatch(name)
        if match is None:
            role = name.partition(".")[2].removesuffix(".weight")
            why = TENSORS.judge({role: True}).get(role) or "does not belong to LoRA, LoHa, LoKr, (IA)^3 or DoRA"
            problems.append(f"tensor '{name}' {why} in kohya's names; LyCORIS's other algorithms are not supported. "
            "Fix: fold the file into its base with the program that trained it, and merge full "
            "models")  # fmt: skip
        elif match["role"] not in ("on_input", "alpha") and (not spec.is_floating or spec.dtype.startswith("float8")):
            problems.append(unreadable(spec))
        else:
            groups.setdefault(match["module"], {})[match["role"]] = name
    modules = []
    for module, names in groups.items():
        prefix = next(p for p in _PARTS if module.startswith(p))
        group = Group(module, names, {n: specs[n] for n in names.values()})
        family = next((f for start, f in _FAMILIES.items() if any(r.startswith(start) for r in names)), "")
        if not family:
            problems.append(f"module '{module}' has {', '.join(names)} and no factors")
            continue
        modules.append(LycorisModule(group, _PARTS[prefix], module[len(prefix) :].replace(".", "_"), family))
    return modules, problems


_FAMILIES = {"hada_": "LoHa", "lokr_": "LoKr", "on_input": "(IA)^3", "lora_": "LoRA"}
"""Prefix of a role -> family."""


class _Factors(OwnDelta):
    """`s B A`, or with a kernel's core `C`: `s sum_ij C[i, j] B[:, i] A[j, :]`; `stored`: down, up, and the core."""

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        down, up, *core = (tensors[n] for n in self.stored)
        up_PR = up.flatten(1)[first:last] * self.scaling
        if not core:
            return up_PR @ down.flatten(1)
        return torch.einsum("ij...,pi,jr->pr...", core[0], up_PR, down.flatten(1)).flatten(1)


def _change(module: LycorisModule, target: str, weights: Tensors) -> Change | str:
    """The change of a base tensor, or a problem."""
    group = module.group
    scaling = _scaling(module, weights)
    if isinstance(scaling, str):
        return scaling
    change: Change | str
    if module.family == "LoHa":
        change = loha_change(_without(group, "alpha", "dora_scale"), target, scaling)
    elif module.family == "LoKr":
        change = lokr_change(_without(group, "alpha", "dora_scale"), target, scaling)
    elif module.family == "(IA)^3":
        change = _ia3(group, target, weights)
    else:
        change = _plain(group, target, scaling)
    magnitude = group.names.get("dora_scale")
    if isinstance(change, str) or magnitude is None:
        return change
    shape = group.shape("dora_scale")
    count = shape[0] if shape else 1
    if math.prod(shape) != count:
        return (
            f"module '{group.module}': dora_scale {shape} scales inputs, which is not supported; expected one "
            "magnitude per output (O x 1 x ...). Fix: fold the file into its base with LyCORIS"
        )
    return Decomposed(target, (*change.stored, magnitude), change, magnitude, count)


def _without(group: Group, *roles: str) -> Group:
    names = {r: n for r, n in group.names.items() if r not in roles}
    return Group(group.module, names, {n: group.specs[n] for n in names.values()})


def _scaling(module: LycorisModule, weights: Tensors) -> float | str:
    """The scale `alpha / r`, or a problem."""
    group = module.group
    rank_of = {"LoHa": ("hada_w1_b",), "LoKr": ("lokr_w1_b", "lokr_w2_b"), "LoRA": ("lora_down",), "(IA)^3": ()}
    rank = next((group.shape(r)[0] for r in rank_of[module.family] if group.shape(r)), 0)
    stored = group.names.get("alpha")
    if stored is None or not rank:
        return 1.0
    alpha = read_alpha(weights, stored)
    if isinstance(alpha, str):
        return alpha
    return alpha / rank if alpha else 1.0


def _plain(group: Group, target: str, scaling: float) -> Change | str:
    if missing := group.missing("lora_down", "lora_up"):
        return missing
    down, up, core = (group.shape(r) for r in ("lora_down", "lora_up", "lora_mid"))
    inner = (up[1] if len(up) > 1 else 0, down[0] if down else 0)
    fits = len(down) > 1 and math.prod(up[2:]) == 1
    fits = fits and (len(core) > 2 and core[:2] == inner if core else inner[0] == inner[1])
    if not fits:
        return f"module '{group.module}': its factors {down}, {up} {core or ''} do not match"
    columns = math.prod(down[1:]) * math.prod(core[2:])
    stored = tuple(group.names[r] for r in ("lora_down", "lora_up", "lora_mid") if r in group.names)
    return _Factors(target, stored, scaling, (up[0], columns))


def _ia3(group: Group, target: str, weights: Tensors) -> Change | str:
    if missing := group.missing("weight", "on_input"):
        return missing
    of_inputs = bool(weights.read(group.names["on_input"]).any())
    return Scaled(target, (group.names["weight"],), math.prod(group.shape("weight")), of_inputs, unchanged=0.0)


def _content(weights: Tensors, base: Model) -> tuple[Content, list[str]]:
    """Changes of the base's tensors, and notes. Modules of components missing in the base are left out."""
    modules, problems = lycoris_modules(weights.specs)
    by_part: dict[str, list[LycorisModule]] = {}
    for module in modules:
        by_part.setdefault(module.part, []).append(module)
    changes: list[Change] = []
    notes = []
    for part, own in by_part.items():
        found, why = find_flat_names(base.specs, [m.path for m in own], part)
        if not found and not why and len(by_part) > 1 and is_absent(part, base):
            notes.append(f"the base has no {part or 'such component'}: the adapter's {len(own)} modules of "
            f"{part or 'other components'} are left out")  # fmt: skip
            continue
        problems += why
        for module in own if not why else ():
            change = _change(module, found[module.path], weights) if module.path in found else (
                f"module '{module.group.module}' matches no tensor of the base ({base.location}). Likely cause: an "
                f"adapter of another base. Without it: --drop '{module.group.module}.*'"
            )  # fmt: skip
            if isinstance(change, str):
                problems.append(change)
            else:
                changes.append(change)
    if by_part and not changes and not problems:
        problems.append(f"the base ({base.location}) is none of its components. Likely cause: another base")
    return Content(changes, {}, problems), notes


def _look(source: Source, file: Model | None, stacks: tuple[StackWord, ...]) -> Adapter | None:
    return adapter_of(file) if file is not None and any(map(_OWN.match, file.specs)) else None


def _fit(adapter: Adapter, base: Model) -> Deltas:
    content, notes = _content(adapter.weights, base)
    expert = fit_changes(adapter, base, content)
    expert.note(*notes, *metadata_notes(adapter.model.folder.header))
    return expert


def _no_factors(adapter: Adapter) -> str:
    return (
        f"a LyCORIS file is merged with its base only: {_NEEDS_BASE}. Fix: pass --base ... and --to model, or "
        "--to adapter with --rank"
    )


def _described(adapter: Adapter) -> dict[str, Any]:
    """Describe a file: the need for the base, modules, and problems."""
    modules, problems = lycoris_modules(adapter.weights.specs)
    families = ", ".join(dict.fromkeys(m.words for m in modules))
    rows = [
        {"name": m.group.module, "kind": m.words, "rank": 0, "part": m.part, "stored": list(m.group.names)}
        for m in modules
    ]
    return {"adapter": f"file of {families}", "needs_base": _NEEDS_BASE, "modules": rows, "problems": problems}


LYCORIS = AdapterFamily("LyCORIS file", _look, _fit, _no_factors, _described)
