"""The memory plan, and searches whose deltas stay in files."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import family as searched
from torch import nn

from actmat.checkpoints.base import TensorSpec
from actmat.errors import RecipeError
from actmat.extras.collect.data import DataOptions
from actmat.extras.models.loading import Loaded, load_model
from actmat.extras.tune import memory
from actmat.extras.tune.live import LiveModel, LiveTensors, state_of
from actmat.extras.tune.memory import MemoryPlan, Sizes, model_device, plan_memory, sizes_of
from actmat.extras.tune.report import TuneReport
from actmat.extras.tune.settings import TuneProgress
from actmat.settings import RunSettings

SPECS = {
    "a.weight": TensorSpec("a.weight", (100, 50), "bfloat16", "x"),
    "b.weight": TensorSpec("b.weight", (30, 100), "bfloat16", "x"),
    "steps": TensorSpec("steps", (7,), "int64", "x"),
}
SIZES = Sizes(experts=2, predictions=10, batch=4, classes=1000)


def planned(max_memory: str, **fields: Any) -> MemoryPlan:
    given: dict[str, Any] = {"dtype": "float32", "merging": 77, "merges": [0] * 10, "gram": False} | fields
    return plan_memory(SPECS, SIZES, RunSettings(max_memory=max_memory), **given)


def test_bytes_are_those_of_the_formulae() -> None:
    plan = planned("1GB")
    model = 4 * (100 * 50 + 30 * 100)  # integers are no weights of the search
    answers, batch = 2 * 10 * 64 * 12, 4 * 4 * 1000 * 4
    assert (plan.model, plan.answers, plan.batch, plan.merging) == (model, answers, batch, 77)
    assert plan.in_memory == 4 * model + answers + batch
    assert plan.with_files == model + 3 * 4 * 5000 + answers + batch
    assert plan.deltas == 10**9 - 3 * model - answers - batch
    assert planned("1GB", dtype="bfloat16").model == model // 2
    assert planned("1GB", gram=True).statistics == 4 * (50**2 + 100**2)
    factored = planned("1GB", merges=[70, 70, 70])
    assert factored.in_memory == 2 * model + 3 * 70 + answers + batch, "no copies of the model"
    assert (factored.merges, factored.whole) == (3, 0)
    assert planned("1GB", merges=[70, 0]).in_memory == 4 * model + 70 + answers + batch


def test_deltas_go_to_files_where_they_do_not_fit_and_less_is_refused() -> None:
    whole = planned("1GB")
    assert planned(str(whole.in_memory)).held == "memory"
    files = planned(str(whole.in_memory - 1))
    assert files.held == "files"
    assert files.why_files is not None
    assert "--max-memory" in files.why_files
    assert whole.why_files is None
    planned(str(whole.with_files)).check()
    with pytest.raises(RecipeError, match="--model-dtype bfloat16") as error:
        planned(str(whole.with_files - 1)).check()
    assert "--max-memory" in str(error.value)
    for plan in (whole, files, planned("1GB", gram=True)):
        assert max(map(len, plan.lines())) <= 80
        assert plan.to_json()["held"] == plan.held


@pytest.mark.parametrize(
    ("run", "limit", "device", "source"),
    [
        (RunSettings(), 900, "cpu", "free"),
        (RunSettings(device="cuda:1,0", device_memory="2GB", max_memory="1GB"), 2 * 10**9, "cuda:1", "--device-memory"),
        (RunSettings(device="mps"), 900, "mps", "free memory on mps"),
    ],
)
def test_the_limit_is_that_of_the_device_of_the_models(
    run: RunSettings, limit: int, device: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    monkeypatch.setattr(memory, "check_device", lambda device: None)
    monkeypatch.setattr(memory, "open_devices", lambda names: [SimpleNamespace(free_bytes=lambda: 1000)])
    plan = plan_memory(SPECS, SIZES, run, dtype="float32", merging=0, merges=[0], gram=False)
    assert (plan.limit, plan.device) == (limit, device)
    assert source in plan.source


@pytest.mark.parametrize(
    ("architecture", "tokens", "predictions", "batch"),
    [
        ("LlamaForCausalLM", 5, 20 * 5, 8 * (30 + 5)),
        ("LlamaForCausalLM", 0, 20 * 30, 8 * 30),
        ("T5ForConditionalGeneration", 5, 20 * 5, 8 * 5),
        ("BertForMaskedLM", 5, 20 * 30, 8 * 30),
        ("ViTForImageClassification", 5, 20, 8),
    ],
)
def test_predictions_by_kind_of_model(architecture: str, tokens: int, predictions: int, batch: int) -> None:
    data = {"x": DataOptions("x", max_samples=20, max_length=30), "y": [{"input_ids": torch.zeros(4, 30)}]}
    config = {"architectures": [architecture], "vocab_size": 99, "id2label": {0: "a", 1: "b"}}
    sizes = sizes_of(data, config, tokens)
    assert (sizes.experts, sizes.predictions, sizes.batch) == (2, predictions, batch)
    assert sizes.classes == (2 if "Image" in architecture else 99)


def test_models_run_on_the_first_of_several_devices(family: Path, tmp_path: Path) -> None:
    assert model_device("cuda:3") == ("cuda:3", "")
    assert model_device("cuda")[0] == "cuda:0"
    assert model_device("mps") == ("mps", "")
    first, note = model_device("cuda:2,0")
    assert first == "cuda:2"
    assert "first of cuda:2,0" in note
    with pytest.raises(RecipeError, match="no kind 'gpu'"):
        model_device("gpu:1")
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match="no CUDA device"):
            tuned(family, tmp_path / "best", device="cuda:0,2")
        assert not (tmp_path / "best").exists()


class Watch(TuneProgress):
    def __init__(self) -> None:
        self.plans: list[MemoryPlan] = []

    def planned(self, plan: MemoryPlan) -> None:
        self.plans.append(plan)


def tuned(family: Path, out: Path, **fields: Any) -> TuneReport:
    space = {"methods": ["average", "tsv"], "scales": [0.5, 1.0], "groups": "kind"}
    return searched.tuned(family, out, space=space, new_tokens=2, budget=20, **fields)


def test_a_search_with_files_finds_what_one_in_memory_finds(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses, with one model in memory at any time, and the reason is told."""
    watch = Watch()
    whole = tuned(family, tmp_path / "whole", progress=watch)
    assert watch.plans[0].held == "memory"
    assert not whole.notes or "files" not in whole.notes[0]
    limit = watch.plans[0].in_memory - 1
    monkeypatch.setattr(memory, "_limit", lambda run, device: (limit, "a limit"))
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most = [0]

    def load(location: str) -> Loaded:
        loaded = load_model(location)
        alive.add(loaded.model)
        most[0] = max(most[0], len(alive))
        return loaded

    filed = tuned(family, tmp_path / "filed", load=load, progress=watch)
    assert watch.plans[1].held == "files"
    assert most == [1]
    assert "a limit" in filed.notes[0]
    assert [t.candidate.key for t in filed.trials] == [t.candidate.key for t in whole.trials]
    for first, second in zip(whole.trials, filed.trials, strict=True):
        assert second.losses == pytest.approx(first.losses, rel=1e-6)
    assert filed.chosen.candidate == whole.chosen.candidate
    assert not (tmp_path / "filed.tune" / "directions").exists()


def test_a_model_in_files_takes_any_candidate(tmp_path: Path) -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    numbers = {name: torch.tensor([0]) for name in state_of(model(0))}
    numbers["1.weight"] = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.uint8)
    base, other = state_of(model(0)), state_of(model(1))
    for folder in (None, tmp_path / "files"):
        live = LiveModel(model(0), ("one", "two"), numbers, folder)
        direction = live.direction("d", lambda: model(1))
        live.write(direction, {"one": 2.0, "two": -1.0}.__getitem__)
        for name, tensor in state_of(live.model).items():
            factor = torch.tensor([2.0, -1.0])[numbers[name].long()]
            assert torch.allclose(tensor, base[name] + factor * (other[name] - base[name]), atol=1e-6)
        live.restore()
        assert all(torch.equal(t, base[name]) for name, t in state_of(live.model).items())
        assert (direction.nbytes == 0) == (folder is not None)
    again = LiveModel(model(0), ("one", "two"), numbers, tmp_path / "files").direction("d", lambda: model(9))
    assert torch.allclose(again.deltas["0.bias"], other["0.bias"] - base["0.bias"], atol=1e-6), "kept from before"


def test_stored_tensors_of_all_shapes(tmp_path: Path) -> None:
    tensors = {
        "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "scalar": torch.tensor(2.5),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    stored = LiveTensors.store(tmp_path / "x", tensors)
    assert len(stored) == 3
    assert all(torch.equal(stored[name], t) and stored[name].dtype == t.dtype for name, t in tensors.items())
    assert stored.get("none") is None
    (tmp_path / "x.json").unlink()
    assert not LiveTensors.is_complete(tmp_path / "x")
