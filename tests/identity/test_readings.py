"""Configs as their classes read them: types of models x changes, whose right answers come from transformers itself."""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.merging import CONFIG, actmat, llama_tensors, save_checkpoint
from tests.tolerances import F32_PRODUCT, relative_error

from actmat.identity import reading
from actmat.identity.configs import InputAgreement, agree_configs
from actmat.identity.entries import is_harmless
from actmat.identity.reading import read_configs

transformers = pytest.importorskip("transformers")
Config = dict[str, Any]
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def class_of(config: Mapping[str, Any]) -> Any:
    return transformers.CONFIG_MAPPING[config["model_type"]]


def as_read(config: Mapping[str, Any]) -> Config:
    """Entries of a config as transformers reads them, without those that change no output."""
    return counting(json.loads(class_of(config).from_dict(dict(config)).to_json_string(use_diff=False)))


def counting(config: Config) -> Config:
    kept = {k: v for k, v in config.items() if not is_harmless(k, config.get("model_type")) and k != "type"}
    if set(kept.get("layer_types") or ()) == {"full_attention"}:
        kept.pop("sliding_window", None)
    beside = [k for k, v in (kept.get("rope_parameters") or {}).items() if kept.get(k) == v]
    return {k: counting(v) if isinstance(v, dict) else v for k, v in kept.items() if k not in beside}


def everywhere(change: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """A change of a config and of all nested ones."""

    def changed(config: Config) -> Config:
        return change({k: changed(v) if isinstance(v, dict) else v for k, v in config.items()})

    return changed


def rope_before_5(config: Config) -> Config:
    rope = config.get("rope_parameters")
    if not rope or any(isinstance(v, dict) for v in rope.values()):
        return config
    beside = {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope}
    scaling = {k: v for k, v in rope.items() if k not in beside} | {"type": rope["rope_type"]}
    plain = {k: v for k, v in config.items() if k != "rope_parameters"}
    return plain | beside | {"rope_scaling": None if rope["rope_type"] == "default" else scaling}


def flat(config: Config) -> Config:
    """The entries of the text model at the top, as the first models of images and text were published."""
    inner = {k: v for k, v in config.get("text_config", {}).items() if k != "model_type"}
    return {k: v for k, v in config.items() if k != "text_config"} | inner


def replaced(names: str, value: Callable[[Any], Any]) -> Callable[[Config], Config]:
    """A change of the entries of some names, in nested configs too."""
    return everywhere(lambda c: {k: value(v) if k in names.split() and v is not None else v for k, v in c.items()})


EPS, ACTIVATION = "rms_norm_eps layer_norm_eps norm_eps layer_norm_epsilon", "hidden_act hidden_activation"
CHANGES: dict[str, Callable[[Config], Config]] = {
    "only its type": lambda c: {"model_type": c["model_type"]},
    "without defaults": lambda c: json.loads(class_of(c).from_dict(dict(c)).to_json_string()),
    "rotary embeddings as before 5": everywhere(rope_before_5),
    "without lists of layers": everywhere(lambda c: {k: v for k, v in c.items() if not k.endswith("layer_types")}),
    "flat": flat,
    "dtype": everywhere(lambda c: {k: v for k, v in c.items() if k != "dtype"} | {"torch_dtype": "float16"}),
    "eps": replaced(EPS, lambda v: v * 3),
    "activation": replaced(ACTIVATION, lambda _: "relu6"),
    "rotary base": lambda c: everywhere(rope_before_5)(replaced("rope_theta", lambda v: v * 3)(c)),
    "no window": everywhere(lambda c: c | ({"sliding_window": None} if "sliding_window" in c else {})),
}


def table(types: list[str]) -> Iterator[tuple[str, Config, Config, bool]]:
    """Type and change, configs of base and expert, and whether transformers reads both alike."""
    for name in types:
        try:
            base = json.loads(transformers.CONFIG_MAPPING[name]().to_json_string(use_diff=False))
            ours = as_read(base)
        except Exception:  # noqa: BLE001 - some need another library, or have no defaults
            continue
        for change, changed in CHANGES.items():
            expert = changed(json.loads(json.dumps(base)))
            try:
                theirs = as_read(expert)
            except Exception:  # noqa: BLE001 - some refuse this change
                continue
            yield f"{name}: {change}", base, expert, ours == theirs


def silent(found: InputAgreement) -> bool:
    """True if nothing but the release is said."""
    return not found.problems and all("were compared as transformers" in note for note in found.notes)


@pytest.mark.parametrize("step", [24, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_what_transformers_reads_alike_is_alike(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every type of model x change is said if the class reads another config, and only then."""
    rows = list(table(sorted(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)[::step]))
    answers = [is_alike for *_, is_alike in rows]
    assert min(answers.count(True), answers.count(False)) > 1500 // step
    wrong = []
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        read_configs([config for _, *both, _ in part for config in both])
        wrong += [f"{name} ({is_alike})" for name, *both, is_alike in part if silent(agreed(*both)) != is_alike]
        for name, base, expert, _ in part:
            written = agree_configs(base, [("one", expert)], "one").configs.get("config.json", base)
            wrong += [f"{name}: written"] if as_read(written) != as_read(expert) else []
    assert not wrong


def agreed(base: Config, expert: Config) -> InputAgreement:
    return agree_configs(base, [("one", expert)])


TINY = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 4, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4,
    "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4,
}  # fmt: skip
RUN = "llama mistral qwen3_moe mixtral gemma2 gemma3_text phi3 gpt2 cohere2 granite modernbert phimoe"


def other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value * 2 + (value == 0)
    return None if isinstance(value, list | dict) else "relu6" if isinstance(value, str) else value


def test_no_entry_that_changes_an_output_is_silent() -> None:
    """Of models with the same weights, one entry is changed at a time, and the model is run."""
    pairs = []
    for kind in RUN.split():
        base = json.loads(transformers.AutoConfig.for_model(kind, **TINY).to_json_string(use_diff=False))
        outputs, state = run(base, {})
        entries = {k: v for k, v in base.items() if other(v) is not None and not isinstance(v, dict)}
        changes = [{k: other(v)} for k, v in entries.items()]
        for change in changes:
            expert = base | change
            try:
                changed, _ = run(expert, state)
            except Exception:  # noqa: BLE001 - a model of other shapes, or no model
                continue
            if relative_error(changed, outputs) > F32_PRODUCT:
                pairs.append((f"{kind}: {change}", base, expert))
    assert len(pairs) > 30
    read_configs([config for _, *both in pairs for config in both])
    assert not [name for name, *both in pairs if silent(agreed(*both))]


def run(config: Config, state: Mapping[str, Any]) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Outputs of a model with these weights, else with random ones; and its weights."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(class_of(config).from_dict(dict(config))).eval()
    if not state:
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.3
    model.load_state_dict(state or model.state_dict())
    with torch.no_grad():
        return model(torch.arange(3, 23)[None])[0], model.state_dict()


@pytest.fixture
def no_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes find neither transformers nor diffusers."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['transformers'] = sys.modules['diffusers'] = None"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    reading._readings.clear()
    yield
    reading._readings.clear()


ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
SCALED = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
FULL = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 21, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("base", "expert", "words"),
    [
        (ROPE, SCALED, ""),
        (SCALED, ROPE, ""),
        (SCALED | {"rope_theta": 1e4 * (1 + 1e-9)}, ROPE, ""),
        (WINDOW, FULL, ""),
        ({"torch_dtype": "bfloat16"}, {"dtype": "float32", "attention_dropout": 0.5}, ""),
        (SCALED, ROPE | {"rms_norm_eps": None}, ""),
        (SCALED, SCALED | {"rope_theta": 1e5}, "rope_parameters.rope_theta (base 10000.0; 'one' 100000.0)"),
        ({}, {"attention_bias": False}, "attention_bias (base absent; 'one' False)"),
        ({}, {"rope_theta": 1e4}, "rope_parameters (base absent"),
        (WINDOW, FULL | {"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "layer_types"),
        (
            {"num_hidden_layers": 1, "rms_norm_eps": 1e-5},
            {"num_hidden_layers": 1, "rms_norm_eps": 1e-6},
            "rms_norm_eps",
        ),
    ],
)
@pytest.mark.usefixtures("no_libraries")
def test_without_transformers_few_spellings_are_known(base: Config, expert: Config, words: str) -> None:
    """The rest is refused, with the fix, or decided by the user."""
    base, expert = LLAMA | base, LLAMA | expert
    found = agreed(base, expert)
    assert found.notes == ()
    assert bool(found.problems) == bool(words)
    if words:
        assert words in found.problems[0]
        fix = "transformers is not installed (pip install transformers). Fix: remove the cause, or give the"
        assert fix in found.problems[0]
        decided = agree_configs(base, [("one", expert)], "one")
        assert not decided.problems
        assert {k: v for k, v in decided.configs["config.json"].items() if k in expert} == expert


def test_nothing_is_read_where_nothing_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_ask", lambda texts: pytest.fail(str(texts)) if texts else ([], ""))
    expert = LLAMA | {
        "torch_dtype": "float16",
        "use_cache": False,
        "eos_token_id": 7,
        "vocab_size": 9,
        "_name_or_path": "x",
    }
    for one in (LLAMA | {"eos_token_id": 2}, expert, LLAMA | {"eos_token_id": [2, 9]}):
        assert not agreed(LLAMA | {"eos_token_id": 2}, one).problems


@pytest.mark.usefixtures("no_libraries")
def test_without_diffusers_parts_of_pipelines_are_refused() -> None:
    unet = {"_class_name": "UNet2DConditionModel"}
    base, expert = (
        {"_class_name": "StableDiffusionPipeline", "components": {"unet": u}} for u in (unet, unet | {"a": 1})
    )
    assert "components.unet.a (base absent; 'one' 1). Cause: diffusers is not inst" in agreed(base, expert).problems[0]


def test_hostile_configs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and labels without end, deep nesting, other repositories, code, and values of other types."""
    monkeypatch.chdir(tmp_path)
    code = "from pathlib import Path\nPath('run').touch()\nclass Config:\n    pass\n"
    for name in ("transformers.py", "torch.py", "evil.py", "json.py"):
        (tmp_path / name).write_text(code)
    deep: Config = {}
    for _ in range(30):
        deep = {"model_type": "llava", "text_config": deep}
    evil = {"auto_map": {"AutoConfig": "evil.Config"}}
    configs: list[tuple[Config, str]] = [
        ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "MemoryError"),
        ({"model_type": "detr", "backbone": "org/name", "use_timm_backbone": False}, "OfflineModeIsEnabled"),
        ({"model_type": "llama", "id2label": 5}, "AttributeError"),
        ({"model_type": ["llama"]}, "TypeError"),
        ({"model_type": "gpt2", "n_layer": float("inf")}, "expected int"),
        ({"model_type": "own"} | evil, ""),
        (LLAMA | evil, ""),
        (deep, ""),
        (LLAMA, ""),
    ]
    for found, (config, words) in zip(read_configs([c for c, _ in configs]), configs, strict=True):
        assert words in found.obstacle, config
        assert bool(found.release) == (not found.obstacle and config["model_type"] != "own")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"), [("SECONDS", 0.01, "took its class"), ("executable", "/no", "no process")]
)
def test_a_process_that_does_not_answer(name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading if name == "SECONDS" else reading.sys, name, value)
    found = agreed(LLAMA, LLAMA | {"rms_norm_eps": value if name == "SECONDS" else 0.5})
    assert words in found.problems[0]


def test_the_plan_names_the_release(tmp_path: Path) -> None:
    for seed, (name, entries) in enumerate({"base": SCALED, "one": ROPE}.items()):
        save_checkpoint(tmp_path / name, llama_tensors(seed=seed), CONFIG | entries)
    found = actmat(["plan", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-m", "linear"], code=0)
    assert "entries that differ were compared as transformers" not in found.out
    save_checkpoint(tmp_path / "one", llama_tensors(seed=1), CONFIG | ROPE | {"attention_bias": False})
    found = actmat(["plan", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-m", "linear"], code=0)
    assert f"entries that differ were compared as transformers {transformers.__version__} reads them" in " ".join(
        found.out.split()
    )
