"""LoRA variants that need the base: DoRA, PiSSA, OLoRA, trained tokens; also mixed with plain pairs.

    W = m * (W_0 + s B A) / ||W_0 + s B A||        DoRA; the norm of each output, over all inputs
    W = W_0 + s B A - U_r S_r V_r^T                PiSSA: the largest singular triplets were removed before training
    W = W_0 + s (B A - Q_r R_r)                    OLoRA: the first columns of `W_0 = Q R` were removed
    W[i] = t[i]                                    trained tokens: rows of a table are replaced

`m`, `t` are stored; `s` is LoRA's scaling.

Sources: Liu et al. (https://arxiv.org/abs/2402.09353), Meng et al. (https://arxiv.org/abs/2404.02948), Buyukakyuz
(https://arxiv.org/abs/2406.01775); PEFT, `tuners/lora` and `tuners/trainable_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.experts.changes.base import Change, Content, Reader
from actmat.experts.lora.adapter import module_product
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.fields import LORA
from actmat.experts.lora.modules import AdapterModule, list_modules
from actmat.extras.adapters.groups import Decomposed, family_keys, shape_misfit
from actmat.linalg.lapack import economy_svd
from actmat.linalg.lowrank import LowRank

_MAGNITUDE = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_magnitude_vector(?:\.weight)?")
_TOKENS = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta")
HANDLED = ("use_dora", "trainable_token_indices", "init_lora_weights")
"""Fields that plain LoRA refuses and this module reads."""
_KEYS = LORA.but(*HANDLED)
_STARTS: dict[str, Literal["pissa", "olora"]] = {"pissa": "pissa", "olora": "olora"}


@dataclass(frozen=True)
class _Pair(Change):
    """`s B A`."""

    module: AdapterModule
    rank: int
    kind: str
    is_turned: bool = False
    reads_base = False

    def misfit(self, shape: tuple[int, int]) -> str:
        return shape_misfit(self.module.shape[::-1] if self.is_turned else self.module.shape, shape)

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        product = module_product(self.module, tensors[self.module.a], tensors[self.module.b])
        b_OR, a_RI = (product.a_RI.mT, product.b_OR.mT) if self.is_turned else (product.b_OR, product.a_RI)
        return b_OR[first:last] @ a_RI

    def factors(self, tensors: Mapping[str, Tensor], base_OI: Tensor, shape: tuple[int, int]) -> LowRank:
        return module_product(self.module, tensors[self.module.a], tensors[self.module.b])


@dataclass(frozen=True)
class _Residual(_Pair):
    """`s B A` minus the part that the initialization removed from the base."""

    start: Literal["pissa", "olora"] = "pissa"
    only_straight: bool = False
    reads_base = True

    def factors(self, tensors: Mapping[str, Tensor], base_OI: Tensor, shape: tuple[int, int]) -> LowRank:
        trained, rank = super().factors(tensors, base_OI, shape), self.module.rank
        if self.start == "olora":
            q_OK, r_KI = torch.linalg.qr(base_OI)
            left, right = q_OK[:, :rank] * self.module.scaling, r_KI[:rank]
        else:
            svd = economy_svd(base_OI)
            left, right = svd.u_MR[:, :rank] * svd.s_R[:rank], svd.vh_RN[:rank]
        return LowRank(torch.cat([trained.b_OR, -left], dim=1), torch.cat([trained.a_RI, right]))


@dataclass(frozen=True)
class _Bias(Change):
    """`s lora_B.bias`, added to the layer's bias."""

    scaling: float
    count: int
    kind: str = "bias"
    reads_base = False

    def misfit(self, shape: tuple[int, int]) -> str:
        return "" if shape == (self.count, 1) else f"it has {self.count} entries"

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        return tensors[self.stored[0]].flatten()[first:last, None] * self.scaling


@dataclass(frozen=True)
class _Tokens(Change):
    """Replaced rows of a table."""

    indices: tuple[int, ...]
    width: int
    kind: str = "tokens"
    reads_base = True

    def misfit(self, shape: tuple[int, int]) -> str:
        if shape[1] != self.width:
            return f"its rows have {self.width} entries"
        last = max(self.indices)
        return "" if last < shape[0] else f"it replaces row {last}, beyond the base's table"

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        out_PI, new_KI = torch.zeros_like(base_PI), tensors[self.stored[0]]
        for k, index in enumerate(self.indices):
            if first <= index < last:
                out_PI[index - first] = new_KI[k] - base_PI[index - first]
        return out_PI


def _read(specs: Mapping[str, TensorSpec], fields: Mapping[str, Any]) -> Content:
    """Content of an adapter of type LORA."""
    config, problems = parse_adapter_config({k: v for k, v in fields.items() if k not in HANDLED})
    magnitudes = {m["module"]: n for n in specs if (m := _MAGNITUDE.fullmatch(n)) is not None}
    tables = {m["module"]: n for n in specs if (m := _TOKENS.fullmatch(n)) is not None}
    special = {*magnitudes.values(), *tables.values()}
    listing = list_modules({n: s for n, s in specs.items() if n not in special}, config)
    empty = "the adapter holds no tensors"
    problems += [p for p in listing.problems if not (special and p == empty)]
    start = _STARTS.get(str(fields.get("init_lora_weights")).lower())
    changes: list[Change] = []
    for module in listing.modules.values():
        changes += _of_module(module, magnitudes.pop(module.name, None), start, specs, problems)
    problems += [f"tensor '{n}' is a DoRA magnitude without factors" for n in magnitudes.values()]
    changes += _of_tables(tables, specs, fields.get("trainable_token_indices"), problems)
    return Content(changes, listing.extras, problems)


def _of_module(
    module: AdapterModule,
    magnitude: str | None,
    start: Literal["pissa", "olora"] | None,
    specs: Mapping[str, TensorSpec],
    problems: list[str],
) -> list[Change]:
    if module.kind == "parameter":
        problems.append(
            f"module '{module.name}' adapts bare parameters, which is supported for plain LoRA only. Fix: fold "
            "the adapter into its base (PeftModel.merge_and_unload) and merge full models"
        )
        return []
    target, pair = f"{module.name.replace('.base_layer', '')}.weight", (module.a, module.b)
    out: list[Change] = []
    if magnitude is not None:
        is_table = module.kind == "embedding"
        count = module.shape[1] if is_table else module.shape[0]
        if specs[magnitude].numel != count:
            problems.append(f"tensor '{magnitude}' has {specs[magnitude].numel} entries; expected {count}")
            return []
        change = _Pair(target, pair, module, module.rank, module.kind, is_table)
        out.append(Decomposed(target, (*pair, magnitude), change, magnitude, count, module.kind))
    elif start is not None and module.kind == "linear":
        # PEFT's OLoRA decomposes a transposed layer in its stored form, so the factors have other shapes
        is_olora = start == "olora"
        out.append(_Residual(target, pair, module, 2 * module.rank, module.kind, start=start, only_straight=is_olora))
    else:
        out.append(_Pair(target, pair, module, module.rank, module.kind))
    if module.bias is not None:
        bias = f"{target.removesuffix('weight')}bias"
        out.append(_Bias(bias, (module.bias,), module.scaling, specs[module.bias].numel))
    return out


def _read_tokens(specs: Mapping[str, TensorSpec], fields: Mapping[str, Any]) -> Content:
    """Content of an adapter of type TRAINABLE_TOKENS."""
    problems: list[str] = []
    tables = {m["module"]: n for n in specs if (m := _TOKENS.fullmatch(n)) is not None}
    problems += [f"tensor '{n}' does not belong to trained tokens" for n in specs if n not in tables.values()]
    return Content(_of_tables(tables, specs, fields.get("token_indices"), problems), {}, problems)


def _of_tables(
    tables: Mapping[str, str], specs: Mapping[str, TensorSpec], value: Any, problems: list[str]
) -> list[Change]:
    """Changes of tables, with rows from the config: for all tables, or by module name suffix."""
    out: list[Change] = []
    for module, stored in tables.items():
        rows = value
        if isinstance(value, Mapping):
            rows = next((v for k, v in value.items() if module == k or module.endswith(f".{k}")), None)
        shape = specs[stored].shape
        is_list = isinstance(rows, Sequence) and all(isinstance(i, int) and i >= 0 for i in rows)
        if not is_list or not rows or len(shape) != 2 or len(rows) != shape[0]:
            problems.append(f"module '{module}': '{stored}' is {shape}, and the config names the rows {str(rows)[:80]}")
            continue
        out.append(_Tokens(f"{module}.weight", (stored,), tuple(rows), shape[1]))
    return out


def _is_lora(fields: Mapping[str, Any]) -> bool:
    return fields.get("peft_type") == "LORA"


DORA = Reader(
    "DoRA",
    lambda fields: _is_lora(fields) and bool(fields.get("use_dora")),
    _read,
    "it normalizes W_0 + B A, so that its delta depends on the base and is not low rank",
    _KEYS,
)
RESIDUAL = Reader(
    "PiSSA or OLoRA",
    lambda fields: _is_lora(fields) and str(fields.get("init_lora_weights")).lower() in _STARTS,
    _read,
    "training started from a modified base, which is computed from the base",
    _KEYS,
)
TOKENS = Reader(
    "trained tokens",
    lambda fields: fields.get("peft_type") == "TRAINABLE_TOKENS",
    _read_tokens,
    "they replace rows of the base's table",
    family_keys(("token_indices",)),
)
LORA_TOKENS = Reader(
    "LoRA with trained tokens",
    lambda fields: _is_lora(fields) and bool(fields.get("trainable_token_indices")),
    _read,
    "the tokens replace rows of the base's table",
    _KEYS,
)
