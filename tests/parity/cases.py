"""Which actmat method, with which options, reproduces which official implementation.

`ORACLE_METHODS[oracle] = (method, options)`. Two keys in `options` are not options of the method:
`weights` (per-expert weights that a recipe would give, cut to the number of experts) and `experts` (how many of the
stored experts take part).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent

Rule = tuple[str, dict[str, Any]]

_MK_WEIGHTS = {"weights": [0.5, 0.3, 0.4, 0.5]}

ORACLE_METHODS: dict[str, Rule] = {
    # the authors of the paper
    "actmat": ("actmat", {}),
    "tact": ("actmat", {"trim": 0.5}),
    "mean": ("average", {}),
    "sum04": ("task_arithmetic", {"scaling": 0.4}),
    "actmat_ties": ("ties", {"density": 0.2, "variant": "actmat"}),
    "actmat_isoc": ("iso_c", {"null": "fill"}),
    "actmat_tsv": ("tsv", {}),
    "actmat_knots_tsv": ("knots", {"order": "actmat", "rule": "tsv"}),
    "actmat_knots_isoc": ("knots", {"order": "actmat", "rule": "iso_c"}),
    "actmat_regmean_d": ("regmean", {}),
    "actmat_regmean_d_s09": ("regmean", {"off_diagonal": 0.9}),
    "actmat_regmean_w": ("regmean", {"form": "weight"}),
    "actmat_regmean_w_s09": ("regmean", {"form": "weight", "off_diagonal": 0.9}),
    "actmat_fisher": ("fisher", {"floor": 1e-8, "floor_unit": "absolute", "floor_use": "drop"}),
    "actmat_combine": ("actmat", {}),
    "actmat_combine_mix": ("actmat", {}),
    # task singular vectors, isotropic merging, KnOTS
    "tsv_m": ("tsv", {}),
    "tsv_m_eigen": ("tsv", {}),
    "iso_c": ("iso_c", {"null": "fill"}),
    "iso_cts": ("iso_cts", {"common_fraction": 0.8}),
    "iso_cts_f05": ("iso_cts", {"common_fraction": 0.5}),
    "knots_ties": ("knots", {"rule": "ties", "density": 0.2}),
    "knots_ta": ("knots", {"rule": "task_arithmetic"}),
    "knots_ties_k60": ("knots", {"rule": "ties", "density": 0.6}),
    # TIES
    "ties": ("ties", {"density": 0.2, "trim": "global"}),
    "ties_k50": ("ties", {"density": 0.5, "trim": "global"}),
    "ties_sum": ("ties", {"density": 0.2, "trim": "global", "reduce": "sum"}),
    # WUDI and its closed forms
    "wudi_300": ("wudi", {"optimizer": "adam", "steps": 300}),
    "wudi_20": ("wudi", {"optimizer": "adam", "steps": 20}),
    "wudi_stationary": ("wudi", {}),
    "swudi_exp300": ("swudi", {"time": 300.0}),
    "aswudi": ("aswudi", {}),
    "wudi_fb_policy": ("wudi", {"optimizer": "adam", "steps": 50}),
    # FusionBench
    "regmean_fb095": ("regmean", {"off_diagonal": 0.95}),
    "regmean_fb100": ("regmean", {"off_diagonal": 1.0}),
    "fisher_fb": ("fisher", {"floor": 1e-6, "floor_unit": "absolute", "normalize": "tensor"}),
    "fisher_fb_nonorm": ("fisher", {"floor": 1e-6, "floor_unit": "absolute"}),
    "fisher_fb_coef": (
        "fisher",
        {"floor": 1e-6, "floor_unit": "absolute", "normalize": "tensor", "weights": [0.2, 0.5, 0.3, 0.2]},
    ),
    # mergekit 0.1.5
    "mk_linear": ("linear", {**_MK_WEIGHTS}),
    "mk_linear_raw": ("linear", {"normalize": False, **_MK_WEIGHTS}),
    "mk_task_arithmetic": ("task_arithmetic", {"scaling": 1.0, **_MK_WEIGHTS}),
    "mk_task_arithmetic_norm": ("linear", {**_MK_WEIGHTS}),
    "mk_ties": ("ties", {"density": 0.5, "variant": "mergekit"}),
    "mk_ties_w": ("ties", {"density": [0.2, 0.4, 0.3], "variant": "mergekit", "reduce": "sum", **_MK_WEIGHTS}),
    "mk_breadcrumbs": ("breadcrumbs", {"density": 0.7, "gamma": 0.1, "scaling": 1.0, **_MK_WEIGHTS}),
    "mk_breadcrumbs_ties": (
        "breadcrumbs",
        {"density": 0.7, "gamma": 0.1, "scaling": 1.0, "sign_election": True, **_MK_WEIGHTS},
    ),
    "mk_breadcrumbs_g01": ("breadcrumbs", {"density": 0.9, "gamma": 0.01, "scaling": 1.0, **_MK_WEIGHTS}),
    "mk_model_stock": ("model_stock", {}),
    "mk_model_stock_fw": ("model_stock", {"filter_wise": True}),
    "mk_slerp_03": ("slerp", {"t": 0.3, "experts": 1}),
    "mk_slerp_05": ("slerp", {"t": 0.5, "experts": 1}),
    "mk_karcher": ("karcher", {}),
    "mk_karcher_base": ("karcher", {"include_base": True}),
    "mk_nearswap": ("nearswap", {"t": 0.01, "experts": 1}),
    "mk_sce": ("sce", {}),
    "mk_sce_k05": ("sce", {"select_topk": 0.5}),
    # the closed forms of 2025-26
    "cart_adarank": ("cart", {"rank": 0.16, "scaling": 2.3}),
    "cart_corespace": ("cart", {"rank": 0.16, "rounding": "up"}),
    "cart_in_ace": ("average", {}),
    "dc_lora_avg": ("dc_merge", {"k": 16, "smoothing": "mean"}),
    "dc_lora_linear": ("dc_merge", {"k": 16, "smoothing": "linear"}),
    "dc_lora_linear_k10": ("dc_merge", {"k": 16, "smoothing": "linear", "density": 0.1}),
    "dc_merge": ("dc_merge", {}),
    "dc_merge_k10": ("dc_merge", {"density": 0.1}),
}

_AVERAGE: Rule = ("average", {})


def _paper_scope(rule: Rule, ignored: tuple[str, ...] = ()) -> Callable[[str, Tensor], Rule]:
    """The paper's protocol: matrices that are neither a text projection nor huge; the mean for the rest."""

    def choose(name: str, base: Tensor) -> Rule:
        skipped = any(part in name for part in ("text_projection", *ignored))
        return rule if base.dim() == 2 and not skipped and max(base.shape) < 20000 else _AVERAGE

    return choose


def _mixed_scope(name: str, base: Tensor) -> Rule:
    return _paper_scope(("actmat", {}) if "attn" in name else ("iso_c", {}))(name, base)


def _wudi_scope(name: str, base: Tensor) -> Rule:
    excluded = base.dim() != 2 or name == "visual.emb.weight"
    return _AVERAGE if excluded else ORACLE_METHODS["wudi_fb_policy"]


SCOPES: dict[str, Callable[[str, Tensor], Rule]] = {
    "actmat_combine": _paper_scope(("actmat", {}), ("emb.weight",)),
    "actmat_combine_mix": _mixed_scope,
    "tsv_m": _paper_scope(("tsv", {})),
    "iso_c": _paper_scope(("iso_c", {})),
    "wudi_fb_policy": _wudi_scope,
}
"""Oracle -> which rule acts on which tensor, for the cases called `policy`."""


@dataclass(frozen=True)
class Case:
    """One golden answer and how to compare with it; fields as in the `index.json` of its folder."""

    folder: str
    file: str
    method: str
    case: str
    status: str
    tolerance: float
    tolerance64: float | None
    compare: str = "numeric"
    T: int = 0
    absolute: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    def __str__(self) -> str:
        return f"{self.method}-{self.case}"

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensor name -> key -> tensor; single-tensor cases use the name `weight`."""
        out: dict[str, dict[str, Tensor]] = {}
        for key, value in load_file(HERE / self.folder / self.file).items():
            name, _, part = key.rpartition("::")
            out.setdefault(name or "weight", {})[part] = value
        own = f"{self.method}::{self.case}"  # of a file with several cases
        return {"weight": out[own]} if own in out else dict(sorted(out.items()))

    def rule(self, name: str, tensors: Mapping[str, Tensor]) -> Rule:
        """Method and options for the tensor called `name`."""
        if self.case == "policy":
            return SCOPES[self.method](name, tensors["base"])
        return ORACLE_METHODS[self.method]

    def error(self, out: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        """The error of a run in this dtype, in units of its tolerance."""
        if dtype == torch.float32 or self.tolerance64 is None:
            return self.distance(out, "expected_delta") / self.tolerance
        end = "_rtol32" if self.status == "float32_cutoff" else ""  # actmat's default cut-off is that of float32
        return self.distance(out, f"expected_delta64{end}") / self.tolerance64

    def distance(self, out: Mapping[str, Tensor], key: str) -> float:
        """Relative Frobenius error over all tensors together (absolute where zero is expected)."""
        expected = {n: t[key].double() for n, t in self.tensors().items()}
        top = sum(float((out[n].double() - t).square().sum()) for n, t in expected.items())
        return top**0.5 if self.absolute else (top / sum(float(t.square().sum()) for t in expected.values())) ** 0.5


def all_cases(*folders: str) -> list[Case]:
    """Every case of the folders' indexes."""
    entries = [(f, e) for f in folders for e in json.loads((HERE / f / "index.json").read_text())["cases"]]
    return [Case(f, **({"compare": "none"} if e["status"] == "ill_posed" else {}) | e) for f, e in entries]


def deltas_of(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The deltas of one tensor, formed from the factors where only those are stored (exact on the binary grid)."""
    stacked = tensors["deltas"] if "deltas" in tensors else tensors["b_t"] @ tensors["a_t"]
    return [d.clone() for d in stacked.to(dtype)]
