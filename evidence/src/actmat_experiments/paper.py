"""Figures of the paper, per benchmark and on average, under the names of the rows that compute the same rule.

M. G. Abdel Hameed et al., "Model Merging via Data-Free Covariance Estimation", 2026, arXiv:2604.01329. The numbers per
benchmark are those of the run records in the authors' repository (marawangamal/actmat); their means are the averages
that the paper's Tables 1, 4 and 5 print, but for `DEVIATING`. A figure stands under the name of the row that is the
authors' rule: `iso_c_paper`, for example, and not `iso_c`, which does not change the null space of a sum of adapters.
docs/paper.md lists what differs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Literal

Regime = Literal["full", "lora"]
Kind = Literal["default", "tuned"]

VARIANTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "iso_c_paper": ("iso_c", {"null": "fill"}),
    "tsv_paper": ("tsv", {"rank_aware": False}),
    "ties_paper": ("ties", {"density": 0.2, "variant": "actmat"}),
    "task_arithmetic_1": ("task_arithmetic", {"scaling": 1.0}),
}
"""Rows that are the authors' variants of a rule whose default differs here: row -> (method, options)."""

LORA_VARIANTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "knots_tsv": ("knots", {"rule": "tsv", "order": "actmat"}),
    "knots_iso_c": ("knots", {"rule": "iso_c", "order": "actmat"}),
    "knots_iso_c_rms": ("knots", {"rule": "iso_c", "order": "actmat", "mean": "rms"}),
}
"""K-TSV and K-Iso-C; the second with the mean of the singular values (the paper and its records), and with their root
mean square, which the paper does not have."""

_MAPS = "q_proj|k_proj|v_proj|o_proj|out_proj|query|key|value|q|k|v|o"
ATTENTION = rf"re:(.*\.)?(in_proj_weight|({_MAPS}|attention\.output\.dense)\.weight)"
"""Weights that packed attention (`nn.MultiheadAttention`) multiplies by without calling a module."""

REASONING = "OLMo-3-7B"
"""Its benchmarks are those of one answer, and `NAME@K` the best of `K`, which is in no average."""

_TUNED: Mapping[str, Mapping[str, float]] = {
    "full": {"T5-base": 71.4, "T5-large": 69.7, "ViT-B/16": 76.1, "ViT-B/32": 69.7, "ViT-L/14": 84.3},
    "lora": {"T5-base": 66.7, "T5-large": 70.9, "ViT-B/16": 75.7, "ViT-B/32": 70.5, "ViT-L/14": 83.0},
}
"""Task arithmetic with lambda chosen on validation data; of these, the records hold averages only."""

DEVIATING: Mapping[tuple[str, Regime, str], float] = {("ViT-B/32", "lora", "base"): 52.0}
"""(model, regime, row) -> printed average that is not the mean of the records: zero-shot of ViT-B/32 is 48.2 in Table 4
and in the records, 52.0 in Table 5. No fine-tuning takes part in it, so the two cannot both hold."""


def paper_models() -> tuple[str, ...]:
    """Models of the paper's tables, as the suites call them."""
    return tuple(_runs())


def paper_tasks(model: str, regime: Regime) -> dict[str, dict[str, float]]:
    """Row -> benchmark -> accuracy in percent; empty for a model or regime that the paper does not have.

    >>> paper_tasks("ViT-B/16", "full")["actmat"]["mnist"]
    99.46
    """
    return {row: dict(tasks) for row, tasks in _runs().get(model, {}).get(regime, {}).items()}


def paper_figures(model: str, regime: Regime) -> dict[tuple[str, Kind], float]:
    """(row, kind of scale) -> average in percent, to one digit as printed; empty for a model without figures.

    >>> paper_figures("ViT-B/16", "full")["actmat", "default"]
    89.5
    """
    found: dict[tuple[str, Kind], float] = {
        (row, "default"): DEVIATING.get((model, regime, row), round(sum(single.values()) / len(single), 1))
        for row, tasks in paper_tasks(model, regime).items()
        if (single := {name: value for name, value in tasks.items() if "@" not in name})
    }
    if found and (tuned := _TUNED[regime].get(model)) is not None:
        found["task_arithmetic", "tuned"] = tuned
    return found


@functools.cache
def _runs() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]:
    """Model -> regime -> row -> benchmark -> percent."""
    text = resources.files("actmat_experiments").joinpath("paper_runs.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = json.loads(text)
    return found
