"""The memory of a search, the device of its models, and the models that become its candidates."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import family as searched
from tests.helpers.family import experts_of
from tests.helpers.models import CASES, Case
from torch import nn

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.resolve import open_model
from actmat.errors import RecipeError, StatisticsError, format_size
from actmat.extras.models.loading import Loaded
from actmat.extras.tune import memory
from actmat.extras.tune.live import LiveModel, Loader, fixed_tensors, reached, state_of
from actmat.extras.tune.memory import model_device, place_models, planned_memory
from actmat.recipe import Recipe
from actmat.run import plan_recipe
from actmat.settings import RunSettings

SPECS = {
    "a.weight": TensorSpec("a.weight", (100, 50), "bfloat16", "x"),
    "b.weight": TensorSpec("b.weight", (30, 100), "bfloat16", "x"),
    "steps": TensorSpec("steps", (7,), "int64", "x"),
}


def planned(run: RunSettings, **fields: Any) -> str:
    given: dict[str, Any] = {"merges": 5, "factors": False, "statistics": 0} | fields
    return planned_memory(SPECS, place_models(run, given.pop("dtype", "float32")), **given)


def test_bytes_are_those_of_the_formulae_and_less_is_refused() -> None:
    model = 4 * (100 * 50 + 30 * 100)  # integers are no weights of the search
    words = [format_size(n) for n in (3 * model, 10**9, 5 * model)]
    line = planned(RunSettings(max_memory="1GB"))
    assert line == "memory: {} of {} that may be used; disk: about {}".format(*words)
    assert len(line) <= 80
    halves = planned(RunSettings(max_memory="1GB"), dtype="bfloat16")
    assert format_size(3 * model // 2) in halves
    factored = planned(RunSettings(max_memory="1GB"), factors=True, statistics=2)
    assert f"memory: {format_size(model)} of" in factored
    assert factored.endswith(format_size(2 * 2 * (50 * 51 + 100 * 101)))
    planned(RunSettings(max_memory=str(3 * model)))
    with pytest.raises(RecipeError, match="--set model_dtype=bfloat16") as error:
        planned(RunSettings(max_memory=str(3 * model - 1)))
    assert "--max-memory" in str(error.value)


@pytest.mark.parametrize(
    ("run", "limit", "device", "source"),
    [
        (RunSettings(), 900, "cpu", "free"),
        (RunSettings(device="cuda:1,0", device_memory="2GB", max_memory="1GB"), 2 * 10**9, "cuda:1", "device_memory"),
    ],
)
def test_the_limit_is_that_of_the_device_of_the_models(
    run: RunSettings, limit: int, device: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    monkeypatch.setattr(memory, "check_device", lambda device: None)
    monkeypatch.setattr(memory, "open_devices", lambda names: [SimpleNamespace(free_bytes=lambda: 1000)])
    place = place_models(run, "float32")
    assert (place.limit, place.device) == (limit, device)
    assert source in place.source


def test_models_run_on_the_first_of_several_devices(family: Path, tmp_path: Path) -> None:
    assert model_device("cuda:3") == ("cuda:3", "")
    assert model_device("cuda")[0] == "cuda:0"
    first, note = model_device("cuda:2,0")
    assert first == "cuda:2"
    assert "first of cuda:2,0" in note
    with pytest.raises(RecipeError, match="no kind 'gpu'"):
        model_device("gpu:1")
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match="no CUDA device"):
            searched.tuned(family, tmp_path / "best", device="cuda:0,2")
        assert not (tmp_path / "best").exists()


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_a_model_takes_any_scale_and_fixed_tensors_keep_theirs(tmp_path: Path) -> None:
    save_file(network(0).state_dict(), tmp_path / "model.safetensors")
    loader = Loader("0", given=lambda place: Loaded(network(int(place)), place, None, place))
    with open_model(tmp_path) as base:
        live = LiveModel(loader, base, {"0.bias"})
        start, other = state_of(network(0)), state_of(network(1))
        live.take("1")
        for scale in (2.0, -1.0, 0.0):
            for name, tensor in state_of(live.scaled(scale)).items():
                factor = float(scale != 0) if name == "0.bias" else scale
                assert torch.allclose(tensor, start[name] + factor * (other[name] - start[name]), atol=1e-6)
        assert all(torch.equal(t, start[name]) for name, t in state_of(live.model).items())


def test_a_changed_parameter_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    """A model of load= that calls its tensors otherwise; where a scale reaches all, any name will do."""
    save_file({f"x{n}": t for n, t in network(0).state_dict().items()}, tmp_path / "model.safetensors")
    loader = Loader("0", given=lambda place: Loaded(network(int(place)), place, None, place))
    with open_model(tmp_path) as base:
        LiveModel(loader, base, ()).take("1")
        with pytest.raises(StatisticsError, match="changes in a merge"):
            LiveModel(loader, base, {"x0.bias"}).take("1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_scale_reaches_is_that_of_a_loaded_checkpoint_of_marks(case: Case, tmp_path: Path) -> None:
    """Loading renames, stacks or transposes tensors: a checkpoint of marks shows what becomes of each."""
    case.build().save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    fixed = {name for name in stored if sum(name.encode()) % 2}
    (tmp_path / "marks").mkdir()
    (tmp_path / "marks" / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    marks = {n: torch.full(t.shape, float(n not in fixed)) for n, t in stored.items()}
    save_file(marks, tmp_path / "marks" / "model.safetensors", {"format": "pt"})
    expected = state_of(case.loader.from_pretrained(tmp_path / "marks", dtype=torch.float32))
    model = case.loader.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with open_model(tmp_path / "base") as base:
        found = reached(model, base, fixed)
    parameters = {n for n, _ in model.named_parameters()} & expected.keys()
    assert parameters <= found.keys()
    for name in parameters:
        assert bool((expected[name] == found[name]).all()), name


def test_the_plan_says_which_tensors_obey_the_scale(family: Path) -> None:
    experts = tuple(map(str, experts_of(family)))
    rules = [
        {"match": ["*.0.*up_proj*"], "options": {"density": 0.5}},
        {"match": ["*up_proj*"], "scale": 1.0},
        {"match": ["*lm_head*"], "keep": "base"},
    ]
    recipe = Recipe.model_validate({"base": str(family / "base"), "experts": experts, "method": "ties", "rules": rules})
    plan = plan_recipe(recipe)
    fixed = fixed_tensors(plan)
    assert "lm_head.weight" in fixed
    assert "model.layers.1.mlp.up_proj.weight" in fixed, "a rule gives it a scale of its own"
    assert not any("layers.0.mlp" in name or "q_proj.weight" in name for name in fixed)
    assert all(i.name in fixed for i in plan.items if "norm" in i.name), "averaged"
