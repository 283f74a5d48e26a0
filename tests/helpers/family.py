"""Tiny Llamas whose experts are far enough from their base to answer otherwise, with texts for each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.docs_fixture import write_models

import actmat
from actmat.extras.tune.report import TuneReport
from actmat.progress import Progress

TEXTS = {
    "math": ["one two", "three four five six", "seven", "eight nine", "two and two", "ten"],
    "code": ["def f(x): return x", "for i in x", "x = 1", "while x", "import y", "f(x)"],
}


def move_weights(file: Path, seed: int, size: float = 0.2) -> None:
    """Add noise to every floating-point tensor of a file."""
    rng = torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor += (torch.randn(tensor.shape, generator=rng) * size * (tensor.ndim > 0)).to(tensor.dtype)
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, `experts/NAME`, `adapters/NAME`, and `NAME.jsonl` for the names of `TEXTS`."""
    folder = tmp_path_factory.mktemp("family")
    write_family(folder)
    return folder


def write_family(folder: Path) -> None:
    """See `family`."""
    write_models(folder)
    for seed, (name, texts) in enumerate(TEXTS.items()):
        move_weights(folder / "experts" / name / "model.safetensors", seed)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


@pytest.fixture(scope="session")
def place(family: Path) -> Path:
    """The family's folder, with the average of its experts in `merged`, and that of the first one in `alone`."""
    actmat.merge(family / "base", experts_of(family), method="average", out=family / "merged", diagnose=True)
    actmat.merge(family / "base", experts_of(family)[:1], method="average", out=family / "alone")
    return family


def experts_of(family: Path) -> list[Path]:
    """Folders of the experts."""
    return [family / "experts" / name for name in TEXTS]


def data_of(family: Path) -> dict[str, Path]:
    """Expert -> its texts."""
    return {name: family / f"{name}.jsonl" for name in TEXTS}


def model_flags(family: Path) -> list[str]:
    """Base and experts on a command line."""
    return ["-b", str(family / "base"), *(x for place in experts_of(family) for x in ("-e", str(place)))]


def data_flags(family: Path, flag: str = "--data") -> list[str]:
    """Texts on a command line."""
    return [x for name, place in data_of(family).items() for x in (flag, f"{name}={place}")]


def tuned(family: Path, out: Path, **fields: Any) -> TuneReport:
    """A search among two methods, by the texts' own tokens unless `fields` say otherwise."""
    usual: dict[str, Any] = {
        "data": data_of(family),
        "space": {"methods": ["average", "ties"], "scales": [1.0]},
        "new_tokens": 0,
        "budget": 2,
    }
    return actmat.tune(family / "base", experts_of(family), out=out, **usual | fields)


class Told(Progress):
    """Keeps the stages and the notes of a search."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def doing(self, what: str, total: int = 0) -> None:
        """Keep it."""
        self.texts.append(what)

    def note(self, text: str) -> None:
        """Keep it."""
        self.texts.append(text)
