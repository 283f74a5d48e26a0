"""The outcome of an analysis: tables of 80 columns, one JSON file, one figure."""

from __future__ import annotations

import abc
import importlib.util
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from rich.table import Table

from actmat.errors import MergeError, OutputError
from actmat.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PALETTE = 256
"""Colors of a PNG: those of the series and their shades towards the background."""


class Analysis(abc.ABC):
    """The outcome of one analysis.

    Attributes:
        name: of the analysis, the command and its files.
    """

    name: ClassVar[str]

    def data(self) -> dict[str, Any]:
        """All numbers and settings, as plain data; NaN and infinities may occur. By default the dataclass's fields."""
        return dict(vars(self))

    @abc.abstractmethod
    def tables(self) -> list[Table]:
        """Tables for the terminal."""

    @abc.abstractmethod
    def figure(self) -> Figure:
        """The picture."""

    def to_json(self) -> dict[str, Any]:
        """`data` with name and versions; NaN and infinity become null."""
        versions = {"actmat": __version__, "torch": str(torch.__version__)}
        return {"analysis": self.name, "versions": versions, **_finite(self.data())}


def need_matplotlib() -> None:
    """Called before long work whose outcome ends as a figure.

    Raises:
        MergeError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MergeError(
            "Figures are drawn with matplotlib, which is not installed here. "
            "Install it with: pip install actmat-experiments"
        )


def save_analysis(analysis: Analysis, out: Path, *, overwrite: bool = False) -> list[Path]:
    """Write `NAME.json`, `NAME.png` and `NAME.svg` into a folder, each appearing whole.

    Raises:
        OutputError: one of them is there already, or the folder cannot be written.
    """
    paths = [out / f"{analysis.name}.{kind}" for kind in ("json", "png", "svg")]
    there = [f"{p} exists" for p in paths if p.exists()]
    if there and not overwrite:
        raise OutputError("Results are there already. Give --overwrite to replace them, or another --out.", there)
    figure = analysis.figure()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with tempfile.TemporaryDirectory(dir=out, prefix=".writing-") as aside:
                made = Path(aside) / path.name
                if path.suffix == ".json":
                    made.write_text(json.dumps(analysis.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
                else:
                    _save_figure(figure, made)
                os.replace(made, path)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}. Choose another place with --out.") from error
    return paths


def _save_figure(figure: Figure, path: Path) -> None:
    """Same figure, same bytes: no date, and names inside an SVG from a fixed salt; a palette keeps a PNG small."""
    import matplotlib
    from PIL import Image

    with matplotlib.rc_context({"svg.hashsalt": "actmat", "svg.fonttype": "none"}):
        if path.suffix == ".svg":
            figure.savefig(path, metadata={"Date": None})
            return
        pixels = io.BytesIO()
        figure.savefig(pixels, dpi=110, format="png", metadata={"Software": None})
    Image.open(pixels).convert("RGB").quantize(PALETTE).save(path, optimize=True)


def degrees(radians: float) -> str:
    """An angle for a table; "-" for None."""
    return shown(math.degrees(radians), ".1f")


def shown(value: float, form: str = ".3g") -> str:
    """A number for a table; "-" for NaN."""
    return "-" if math.isnan(value) else format(value, form)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names of linear maps as pictures show them: without the `.weight` that nearly all end in."""
    return {n: n.replace(".weight", "").replace("in_proj_weight", "in_proj") for n in names}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
