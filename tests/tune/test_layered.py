"""Models whose weights do not fit run layer by layer, with the statistics and answers of the whole model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.family import TEXTS, data_flags, experts_of, model_flags
from tests.helpers.merging import actmat
from torch import Tensor, nn

from actmat.checkpoints.resolve import open_model
from actmat.errors import StatisticsError
from actmat.extras.collect.collect import collect
from actmat.extras.models import layered
from actmat.extras.models.layered import Placement
from actmat.extras.models.loading import Loaded, load_model, switched
from actmat.extras.tune import memory
from actmat.extras.tune.trying import answer

PROMPTS = [{"input_ids": torch.arange(5, 5 + n)[None]} for n in (7, 4)]


@pytest.fixture(scope="module")
def half(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family, its models stored in bfloat16."""
    folder = tmp_path_factory.mktemp("half") / "family"
    shutil.copytree(family, folder)
    for place in (folder / "base", *experts_of(folder)):
        file, config = place / "model.safetensors", place / "config.json"
        save_file({n: t.to(torch.bfloat16) for n, t in load_file(file).items()}, file, {"format": "pt"})
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    return folder


def place_of(half: Path, **fields: Any) -> Placement:
    """A place that has room for one layer and all outside of layers."""
    with open_model(half / "base") as base:
        peak = Placement(limit=1).peak(base.specs)
        assert peak < layered.model_bytes(base.specs, "float32")
    return Placement(limit=peak, source="test", **fields)


def both(half: Path, place: Path) -> tuple[Loaded, Loaded]:
    """An input, whole and layer by layer."""
    base = str(half / "base")
    whole, parts = (load_model(str(place), adapters_base=base, place=p) for p in (Placement(), place_of(half)))
    assert not whole.note
    assert "layer by layer" in parts.note
    return whole, parts


def check_same(whole: Loaded, parts: Loaded) -> None:
    """Logits, a written answer and the Gram matrices are the same, bit for bit."""
    runs = (whole, parts)
    with torch.no_grad():
        logits = [[m.model(**batch).logits for batch in PROMPTS] for m in runs]
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
    assert len({answer(m, "one two", new_tokens=4, chat=False) for m in runs}) == 1
    first, second = (collect(m.model, PROMPTS, checkpoint=m.checkpoint, adapter=m.adapter) for m in runs)
    assert first.header.model_dump() == second.header.model_dump()
    assert first.header.grams
    assert all(torch.equal(t, second.tensors[n]) for n, t in first.tensors.items())


@pytest.mark.parametrize("kind", ["experts", "adapters"])
def test_answers_and_statistics_are_those_of_the_whole_model(half: Path, kind: str) -> None:
    whole, parts = both(half, half / kind / "math")
    check_same(whole, parts)
    if kind == "adapters":
        check_same(*(switched(m, str(half / "adapters" / "code")) for m in (whole, parts)))


def test_one_layer_is_wide_at_a_time_and_a_pass_that_fails_leaves_none(half: Path) -> None:
    model = load_model(str(half / "base"), place=place_of(half)).model
    stored = {id(p): p.data_ptr() for p in model.parameters()}
    wide: list[int] = []

    def measure(module: nn.Module, _: Any) -> None:
        wide.append(sum(p.nbytes for p in model.parameters() if p.dtype == torch.float32))
        if len(wide) > 8:
            raise MemoryError

    inner = [m for n, m in model.named_modules() if n.endswith("down_proj")]
    for module in inner:
        module.register_forward_pre_hook(measure)
    with torch.no_grad():
        model(**PROMPTS[0])
    assert len(wide) == len(inner) > 1
    limit = place_of(half).limit
    assert max(wide) <= limit
    wide += [0] * 8
    with pytest.raises(MemoryError):
        model(**PROMPTS[0])
    assert {id(p): p.data_ptr() for p in model.parameters()} == stored
    assert all(p.dtype == torch.bfloat16 for n, p in model.named_parameters() if ".layers." in n)


def test_less_than_a_layer_is_refused_and_so_is_a_backward_pass(half: Path) -> None:
    place = place_of(half)
    with pytest.raises(StatisticsError, match=r"does not fit\. Fix: --set model_dtype=bfloat16"):
        load_model(str(half / "base"), place=Placement(limit=place.limit - 1, source="test"))
    loaded = load_model(str(half / "base"), place=place)
    with pytest.raises(StatisticsError, match="needs the whole model"):
        collect(loaded.model, PROMPTS, checkpoint=loaded.checkpoint, gram=False, fisher=True)


def files_of(folder: Path) -> dict[str, Tensor]:
    """Tensors of an output."""
    return {f"{f.name} {n}": t for f in sorted(folder.rglob("*.safetensors")) for n, t in load_file(f).items()}


@pytest.mark.parametrize("name", ["merge", "merge in full", "try", "diagnose", "tune", "statistics"])
def test_commands_say_it_and_give_the_same(
    name: str, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, base, quick = place_of(half).limit, ["-b", str(half / "base")], ["--set", "new_tokens=2"]
    adapters = [*base, *(x for name in TEXTS for x in ("-e", f"{name}={half / 'adapters' / name}"))]
    outcomes, outputs = [], []
    for out in (tmp_path / "whole", tmp_path / "layers"):
        if out.name == "layers":
            monkeypatch.setattr(memory, "_limit", lambda *_: (limit, "test"))
        to, diagnosed = ["--out", str(out)], out.with_suffix(".merged")
        if name == "diagnose":
            actmat(["merge", *adapters, "-m", "average", "--out", diagnosed], code=0)
        words = {
            "merge": ["merge", *adapters, "--to", "peft", *data_flags(half), *quick, *to],
            "merge in full": ["merge", *model_flags(half), *data_flags(half), *quick, *to],
            "try": [
                "try",
                *model_flags(half),
                "-m",
                "average",
                "--prompt",
                "one two",
                "--new-tokens",
                "2",
                "--compare",
            ],
            "diagnose": ["diagnose", str(diagnosed), *data_flags(half), *quick],
            "tune": ["tune", *adapters, *data_flags(half), "--budget", "2", *quick, *to],
            "statistics": ["statistics", "collect", str(half / "adapters/math"), *base, *data_flags(half)[:2], *to],
        }[name]
        words = [w.removeprefix("math=") for w in words] if name == "statistics" else words
        outcomes.append(actmat(words))
        outputs.append(files_of(out))
    assert [o.code for o in outcomes] == [0, 0], outcomes
    assert ["layer by layer" in o.out + o.err for o in outcomes] == [False, True]
    whole, parts = outputs
    assert whole.keys() == parts.keys()
    assert all(torch.equal(t, parts[n]) for n, t in whole.items())
    assert bool(whole) == (name not in ("try", "diagnose"))
    if name in ("try", "diagnose"):
        said = [re.sub(r"whole|layers|[\d.]+ s\b", "", o.out) for o in outcomes]
        assert said[0] == said[1]
