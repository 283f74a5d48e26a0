"""`actmat inspect --serve` prints lines that load the output; the Python ones are run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.docs_fixture import write_models
from tests.helpers.merging import actmat as run

from actmat.errors import CheckpointError
from actmat.extras.serving import serving_commands


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    write_models(folder)
    experts = [x for n in ("math", "code") for x in ("-e", str(folder / "experts" / n))]
    run(["merge", "-b", folder / "base", *experts, "-m", "average", "--out", folder / "a b", "-q"], code=0)
    adapters = [x for n in ("math", "code") for x in ("-e", str(folder / "adapters" / n))]
    run(["merge", *adapters, "-m", "average", "--out", folder / "adapter", "-q"], code=0)
    return folder


def edited(folder: Path, tmp_path: Path, name: str, **fields: Any) -> str:
    """A folder with a manifest and a changed config."""
    (tmp_path / "actmat_manifest.json").write_text("{}")
    config = json.loads((folder / name).read_text())
    (tmp_path / name).write_text(json.dumps(config | fields))
    return str(tmp_path)


def test_the_lines_of_a_model_load_it(outputs: Path) -> None:
    found = serving_commands(str(outputs / "a b"))
    assert shlex.split(found.vllm) == ["vllm", "serve", str(outputs / "a b")]
    scope: dict[str, Any] = {}
    exec("\n".join(found.python), scope)
    assert type(scope["model"]).__name__ == "LlamaForCausalLM"
    assert scope["tokenizer"]("w3")["input_ids"]


def test_the_lines_of_an_adapter_load_it_on_its_base(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(outputs)
    found = serving_commands("adapter")
    assert found.vllm == "vllm serve base --enable-lora --lora-modules adapter=adapter"
    scope: dict[str, Any] = {}
    exec("\n".join(found.python), scope)
    assert any("lora" in n for n, _ in scope["model"].named_parameters())
    assert found.notes == ("request the model 'adapter'",)


def test_vllm_takes_adapters_of_causal_models_only(outputs: Path, tmp_path: Path) -> None:
    """Its other demands are those of tests/adapters/test_adapter_serving.py."""
    found = serving_commands(edited(outputs / "adapter", tmp_path, "adapter_config.json", task_type="SEQ_CLS"))
    assert "not causal language modelling" in " ".join(found.notes)
    assert not found.vllm


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"auto_mapping": {"base_model_class": "LlamaForCausalLM"}}, "AutoModelForCausalLM"),
        ({"auto_mapping": {"base_model_class": "BertModel"}}, "BertModel"),
        ({"auto_mapping": {"base_model_class": "x'); import os #"}}, "AutoModel"),
        ({"base_model_name_or_path": "HERE/base"}, "AutoModelForCausalLM"),
        ({"base_model_name_or_path": "org/name"}, "AutoModel"),
    ],
)
def test_an_adapter_without_a_task_is_loaded_by_what_is_known_of_its_base(
    outputs: Path, tmp_path: Path, fields: dict[str, Any], kind: str
) -> None:
    fields = {k: v.replace("HERE", str(outputs)) if isinstance(v, str) else v for k, v in fields.items()}
    found = serving_commands(edited(outputs / "adapter", tmp_path, "adapter_config.json", **fields, task_type=None))
    assert f"from transformers import {kind}" in found.python
    assert bool(found.vllm) is (kind == "AutoModelForCausalLM")


@pytest.mark.parametrize(
    ("fields", "python", "vllm"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "AutoModelForSeq2SeqLM", ""),
        ({"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification", ""),
        ({"architectures": ["CLIPModel"], "vision_config": {}}, "AutoProcessor, CLIPModel", ""),
        ({"architectures": ["x'); import os #"]}, "import AutoModel, AutoTokenizer", ""),
        ({"auto_map": {"AutoModel": "m.M"}}, "trust_remote_code=True", "--trust-remote-code"),
    ],
)
def test_other_models(outputs: Path, tmp_path: Path, fields: dict[str, Any], python: str, vllm: str) -> None:
    found = serving_commands(edited(outputs / "a b", tmp_path, "config.json", **fields))
    assert python in "\n".join(found.python)
    assert vllm in found.vllm
    assert bool(found.vllm) is bool(vllm)


def test_a_pipeline_of_diffusion_models_is_loaded_by_its_library(tmp_path: Path) -> None:
    for name in ("actmat_manifest.json", "model_index.json"):
        (tmp_path / name).write_text("{}")
    found = serving_commands(str(tmp_path))
    assert "DiffusionPipeline.from_pretrained" in found.python[1]
    assert found.vllm == ""


def test_the_command_prints_lines_json_or_the_one_command(outputs: Path, tmp_path: Path) -> None:
    out = str(outputs / "adapter")
    text = run(["inspect", "--serve", out]).out
    assert text.startswith("# vLLM\nvllm serve ")
    assert compile(text.partition("# Python\n")[2], "printed", "exec")
    assert json.loads(run(["inspect", "--serve", out, "--json"]).out)["vllm"] in text
    assert run(["inspect", "--serve", out, "--quiet"]).out.startswith("vllm serve ")
    refused = edited(outputs / "adapter", tmp_path, "adapter_config.json", r=600)
    silent = run(["inspect", "--serve", refused, "-q"])
    assert (silent.code, silent.out, run(["inspect", "--serve", refused]).code) == (1, "", 0)
    assert "rank 600 exceeds vLLM's maximum" in silent.err
    with pytest.raises(CheckpointError, match=r"no actmat_manifest\.json"):
        serving_commands(str(outputs / "base"))
