"""Figures of the paper's tables 1 and 2: average test accuracy in percent, and what is known to be wrong with them.

M. G. Abdel Hameed et al., "Model Merging via Data-Free Covariance Estimation", 2026, arXiv:2604.01329.
"""

from __future__ import annotations

from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.table import Figure

__all__ = ["NOTES", "paper_figures"]

_MODELS = ("T5-base", "T5-large", "ViT-B/16", "ViT-B/32", "ViT-L/14")

_FULL = {
    ("base", "default"): (54.0, 51.3, 55.5, 48.2, 65.2),
    ("experts", "default"): (76.0, 82.4, 94.6, 90.4, 94.1),
    ("regmean", "default"): (74.5, 80.8, 87.6, 83.0, 90.0),
    ("task_arithmetic", "tuned"): (71.4, 69.7, 76.1, 69.7, 84.3),
    ("average", "default"): (64.8, 50.9, 72.2, 65.5, 79.3),
    ("iso_c", "default"): (66.1, 57.6, 88.4, 81.6, 90.5),
    ("tsv", "default"): (72.9, 74.7, 88.8, 83.3, 91.1),
    ("actmat", "default"): (76.0, 79.8, 89.5, 82.9, 92.2),
}
_LORA = {
    ("experts", "default"): (76.5, 79.2, 84.1, 80.7, 89.0),
    ("regmean", "default"): (75.9, 77.7, 80.3, 76.5, 86.9),
    ("average", "default"): (62.2, 57.2, 64.3, 56.8, 72.4),
    ("iso_c", "default"): (56.1, 52.1, 57.5, 50.4, 66.8),
    ("knots_iso_c", "default"): (64.7, 69.4, 74.9, 70.4, 83.6),
    ("tsv", "default"): (72.2, 75.4, 78.4, 73.0, 85.4),
    ("knots_tsv", "default"): (67.6, 71.1, 74.8, 69.6, 83.4),
    ("actmat", "default"): (72.0, 76.7, 78.6, 74.6, 86.1),
}

NOTES: dict[str, tuple[str, ...]] = {
    "vision": (
        "The paper's LoRA experts adapt the packed q, k and v alone and its LoRA row of RegMean reuses the statistics "
        "of full fine-tuning; here all linear layers are adapted.",
        "The paper's 'data-free task arithmetic, 0.4' is in truth lambda = 1; it is not repeated here.",
        "The paper's ViT-B/16 expert of DTD (98.3 %) looks trained on test images.",
    ),
    "language": (
        "The paper's Story Cloze was rendered with empty choices: 51.2 % for every model, so its averages hold a "
        "constant for that task.",
        "The paper's WikiQA sits at its majority class.",
        "Iso-C at scale 1 is under-scaled for T5.",
    ),
}
"""Where a figure of the paper cannot hold, or was measured on something else; printed below the tables."""


def paper_figures(model: str, regime: Regime) -> Figure:
    """The paper's averages for a model, empty for a model that it does not have."""
    if model not in _MODELS:
        return {}
    column = _MODELS.index(model)
    rows = _FULL if regime == "full" else _LORA
    return {row: figures[column] for row, figures in rows.items()}  # type: ignore[misc]  # keys are literals above
