"""The table of docs/results.md: what each page of results shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).parent
SHOWN: Mapping[str, tuple[str, str]] = {
    "evidence.md": ("Evidence", "methods compared on pretrained models of text, images and language, with intervals"),
    "families.md": (
        "Families",
        "every architecture of transformers and diffusers that was merged, loaded again and run",
    ),
    "semantics.md": (
        "Proved against PEFT",
        "base + adapter against PEFT's own weights, by family, option and version of PEFT",
    ),
    "performance.md": ("Performance", "times, memory and predicted times of merges, also of other tools"),
    "tune-results.md": (
        "Choice by unlabelled inputs",
        "the choices of `actmat tune` against test data that the search never saw",
    ),
    "data-free.md": ("Merges without data", "estimates of the layers' inputs and of norms, against the average"),
    "forecast.md": (
        "Forecasts",
        "19 numbers from the weights against the accuracy that experts lose; none predicts it",
    ),
    "experiments/README.md": (
        "Experiments",
        "the paper's experiments, and smaller ones of the same form on real data",
    ),
    "analyses/README.md": ("Analyses", "the paper's theorems, derived and measured"),
    "paper.md": ("The paper, item by item", "where every equation, table and setting is, and how it differs"),
    "../benchmarks/README.md": ("Benchmarks", "all programs that measure, and the machine that they ran on"),
}
"""Page -> title, and what it shows; a page that does not exist is left out."""


def results_table(table: Callable[[list[str], list[list[str]]], str]) -> str:
    """A row per page."""
    rows = [[f"[{title}]({page})", shows] for page, (title, shows) in SHOWN.items() if (DOCS / page).exists()]
    return table(["page", "shows"], rows)
