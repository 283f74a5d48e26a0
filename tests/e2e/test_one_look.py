"""Configs and headers of inputs are read once in a run, however many decisions depend on them."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import actmat
from actmat.run import automatic

watched: list[tuple[Path, Counter[str]]] = []
"""Folder whose files are watched, and how often each was opened. Python cannot remove an audit hook."""


def count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and watched:
        folder, opened = watched[-1]
        path = Path(str(arguments[0]))
        if path.is_relative_to(folder):
            opened[path.relative_to(folder).as_posix()] += 1


sys.addaudithook(count)


@contextmanager
def opened_files(folder: Path) -> Iterator[Counter[str]]:
    """How often each file below a folder is opened."""
    watched.append((folder, Counter()))
    try:
        yield watched[-1][1]
    finally:
        watched.pop()


@pytest.mark.parametrize("base", [True, False])
@pytest.mark.parametrize("kind", ["experts", "adapters"])
def test_a_merge_opens_every_file_of_its_inputs_once(kind: str, base: bool, models: Path, tmp_path: Path) -> None:
    """By `auto`, which looks at the configs, and into a kind of output that the inputs decide."""
    actmat.plan(models / "base", [models / "experts" / "math"])  # imports first
    with opened_files(models) as opened:
        experts = [models / kind / name for name in ("math", "code")]
        report = actmat.merge(
            models / "base" if base else None, experts, out=tmp_path / "out", durable=False, threads=1
        )
    assert report.plan.recipe.method != automatic.AUTO
    weights, config = ("adapter_model", "adapter_config.json") if kind == "adapters" else ("model", "config.json")
    copied = {f"{kind}/math"} if not base and kind == "experts" else {"base"} if base else set()
    read = {f"{kind}/{name}/{file}" for name in ("math", "code") for file in (f"{weights}.safetensors", config)}
    read |= {"base/model.safetensors", "base/config.json"} if base else set()
    assert {file for file in opened if file.endswith(("safetensors", "config.json"))} >= read
    twice = {file for file, times in opened.items() if times > 1}
    own = ("config.json", "tokenizer.json", "tokenizer_config.json")
    assert twice <= {f"{folder}/{file}" for folder in copied for file in own}, "the output has copies of these"
    assert max(opened.values()) <= 2, "once to read, once to copy"


def test_a_base_that_only_names_itself_is_not_opened_for_more(models: Path, tmp_path: Path) -> None:
    """Of the base of merged adapters nothing but the config is of use."""
    with opened_files(models) as opened:
        experts = [models / "adapters" / name for name in ("math", "code")]
        actmat.merge(models / "base", experts, out=tmp_path / "out", to="adapter", durable=False, threads=1)
    assert opened["base/config.json"] == 1
    assert opened["base/model.safetensors"] == 1, "its header"
