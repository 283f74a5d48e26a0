"""Files for llama.cpp inside llama.cpp: logits of a merged model and of an adapter, against transformers.

Skipped where llama-cpp-python is not installed: it is built from source, and only here it is needed.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.checkpoints.test_gguf import shapes
from tests.checkpoints.test_gguf_writing import as_checkpoint, two_modules
from tests.helpers.gguf_files import VOCAB, writer_of, written
from tests.tolerances import F32_FORWARD

import actmat

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.slow

PROMPT = [5, 17, 3, 42, 8]


def write_with_tokenizer(file: Path, seed: int = 0) -> Path:
    """A tiny Llama with a vocabulary that llama.cpp loads, float32."""
    from gguf import TokenType

    writer = writer_of(file)
    writer.add_tokenizer_model("llama")
    special = ["<unk>", "<s>", "</s>"]
    writer.add_token_list([*special, *(f"t{i}" for i in range(VOCAB - 3))])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.NORMAL] * (VOCAB - 3)])
    rng = np.random.default_rng(seed)
    for name, shape in shapes().items():
        data = rng.standard_normal(shape).astype(np.float32) * (0.2 if len(shape) > 1 else 1.0)
        writer.add_tensor(name, data + (1.0 if len(shape) == 1 else 0.0))
    written(writer)
    return file


def in_llama_cpp(model: Path, adapter: Path | None = None) -> torch.Tensor:
    """Logits of all tokens of the prompt."""
    lora = {} if adapter is None else {"lora_path": str(adapter)}
    loaded = llama_cpp.Llama(  # keys and values as float32, which are float16 by default
        str(model), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0, **lora
    )
    loaded.eval(PROMPT)
    return torch.tensor(np.array(loaded.scores[: len(PROMPT)]))


def in_transformers(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


def test_a_merged_model_and_an_adapter_answer_as_in_transformers(tmp_path: Path) -> None:
    base = write_with_tokenizer(tmp_path / "base.gguf")
    experts = [as_checkpoint(write_with_tokenizer(tmp_path / f"{k}.gguf", k), tmp_path / str(k)) for k in (1, 2)]
    actmat.merge(base, experts, method="average", out=tmp_path / "merged", dtype="float32", scope="all")
    actmat.export(tmp_path / "merged", out=tmp_path / "merged.gguf", to="gguf", like=str(base), type="f32")
    expected = in_transformers(tmp_path / "merged")
    torch.testing.assert_close(in_llama_cpp(tmp_path / "merged.gguf"), expected, rtol=F32_FORWARD, atol=F32_FORWARD)

    two_modules(tmp_path / "lora", (4, 2))
    actmat.export(tmp_path / "lora", out=tmp_path / "lora.gguf", to="gguf", like=str(base))
    model = as_checkpoint(base, tmp_path / "model")
    actmat.merge(model, [tmp_path / "lora"], method="linear", out=tmp_path / "baked", dtype="float32")
    expected = in_transformers(tmp_path / "baked")
    found = in_llama_cpp(base, tmp_path / "lora.gguf")
    torch.testing.assert_close(found, expected, rtol=F32_FORWARD, atol=F32_FORWARD)
    assert float((in_transformers(model) - expected).abs().max()) > 0.1  # the adapter does something
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["rank_pattern"]
