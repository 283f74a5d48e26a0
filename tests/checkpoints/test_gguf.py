"""GGUF files, written by the package gguf, against what transformers loads of them; and damaged ones."""

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.quantised import save_model

from actmat import merge
from actmat.checkpoints.formats.gguf.file import QUANTISED
from actmat.checkpoints.formats.gguf.header import read_gguf_header
from actmat.checkpoints.resolve import open_checkpoint, open_handle
from actmat.errors import CheckpointError

HEADS, KV_HEADS, WIDTH, INNER, LAYERS, VOCAB = 4, 2, 64, 96, 2, 80
METADATA: dict[str, Any] = {
    "block_count": LAYERS, "context_length": 128, "embedding_length": WIDTH, "feed_forward_length": INNER,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": WIDTH // HEADS, "vocab_size": VOCAB,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    kv = WIDTH * KV_HEADS // HEADS
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        found |= {f"blk.{i}.{n}.weight": s for n, s in {
            "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH),
            "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER)}.items()}  # fmt: skip
    return found


def write_gguf(file: Path, kind: str = "Q8_0", architecture: str = "llama", seed: int = 0, **extra: Any) -> Path:
    """A tiny model whose matrices are of this type."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(file, architecture)
    writer.add_name("tiny")
    for key, value in METADATA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    for key, value in extra.items():
        writer.add_uint32(key.replace("__", "."), value)
    rng = np.random.default_rng(seed)
    for name, shape in shapes().items():
        data = rng.standard_normal(shape).astype(np.float32)
        own = GGMLQuantizationType["F32" if len(shape) == 1 else kind]
        stored = data.astype(np.float16) if own.name == "F16" else quantize(data, own) if own.name != "F32" else data
        writer.add_tensor(name, stored, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("kind", "architecture"), [("Q8_0", "llama"), ("Q4_0", "qwen2"), ("F16", "llama")])
def test_tensors_and_config_are_those_that_transformers_loads(kind: str, architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    file = write_gguf(tmp_path / "m.gguf", kind, architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight" and "rotary" not in n}
    with open_checkpoint(file) as checkpoint, open_handle(checkpoint.handle()) as again:
        # a qwen2 model has biases that this file lacks
        assert set(checkpoint.specs) == {n for n in state if not n.endswith("bias")}
        assert again.specs == checkpoint.specs
        for name, spec in checkpoint.specs.items():
            found = checkpoint.read(name)
            assert torch.equal(found, state[name].to(found.dtype)), name
            out = memoryview(bytearray(spec.nbytes - 3))
            again.read_into(name, 3, out)
            assert out == bytes(found.view(torch.uint8).flatten().tolist())[3:]
            assert (checkpoint.scheme(name) == f"GGUF {kind}") == (spec.dtype == "bfloat16")
        config = checkpoint.config or {}
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                      "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "model_type",
                      "max_position_embeddings"):  # fmt: skip
            wanted = getattr(model.config, field)
            assert config[field] == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), field


def test_a_gguf_base_gives_a_model_that_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = write_gguf(tmp_path / "base.gguf")
    with open_checkpoint(base) as checkpoint:
        tensors = {n: checkpoint.read(n) for n in checkpoint.specs}
    changed = {n: (t.float() * 1.5).to(t.dtype) for n, t in tensors.items()}
    expert = save_model(tmp_path / "expert", changed, None)
    merge(base, [expert], out=tmp_path / "out", method="average")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = model.state_dict()
    for name, tensor in changed.items():
        assert torch.allclose(state[name].float(), tensor.float(), rtol=1e-2), name


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_type_that_is_listed_can_be_decoded(kind: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    own = GGMLQuantizationType[kind]
    entries, nbytes = GGML_QUANT_SIZES[own]
    data = np.random.default_rng(0).integers(0, 255, (3, 2 * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        assert dequantize(data, own).shape == (3, 2 * entries)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architecture": "gemma2"}, "found 'gemma2'"),
        ({"split__count": 2}, "part of a split GGUF file"),
    ],
)
def test_files_that_are_not_read_are_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", **change))


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf").read_bytes()
    key = b"llama.attention.head_count_kv" + struct.pack("<I", 4)
    (tmp_path / "m.gguf").write_bytes(content.replace(key + struct.pack("<I", KV_HEADS), key + struct.pack("<I", 7)))
    with pytest.raises(CheckpointError, match="7 heads"):
        open_checkpoint(tmp_path / "m.gguf")


def header(*entries: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    number = len(entries) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, tensors, number) + b"".join(entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGML" + bytes(30), "magic"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "version"),
        (b"GGUF\x03", "file ends"),
        (header(tensors=1 << 60), "number of tensors"),
        (header(count=1 << 60), "number of entries"),
        (header(count=3), "file ends"),
        (header(HUGE), "a text of"),
        (header(text("a") + struct.pack("<I", 99)), "unknown type 99"),
        (header(text("a") + struct.pack("<II", 9, 0) + HUGE), "a list of"),
        (header(text("a") + struct.pack("<IIQ", 9, 4, 10_000_000)), "file ends"),
        (header(text("a") + struct.pack("<IIQ", 9, 8, 10_000_000)), "file ends"),
        (header(text("a") + struct.pack("<IIQ", 9, 9, 1)), "list of the type 9"),
        (header(text("a") + struct.pack("<IB", 0, 1), text("a") + struct.pack("<IB", 0, 1)), "twice"),
        (header(text("general.alignment") + struct.pack("<II", 4, 0)), "alignment"),
        (header(text("w") + struct.pack("<I", 99), tensors=1, count=0), "99 axes"),
        (header(text("w") + struct.pack("<I", 1) + HUGE, tensors=1, count=0), "an axis"),
    ],
)
def test_hostile_headers_are_refused(content: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_gguf_header(lambda at, n: content[at : at + n], len(content), file="m.gguf")


def test_tensors_beyond_the_file_or_in_each_other_are_refused(tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    (tmp_path / "short.gguf").write_bytes(content[:-4000])
    with pytest.raises(CheckpointError, match="beyond the file"):
        open_checkpoint(tmp_path / "short.gguf")
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    content[at : at + 8] = struct.pack("<Q", 0)
    (tmp_path / "overlap.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="not its own"):
        open_checkpoint(tmp_path / "overlap.gguf")


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    content, rng = write_gguf(tmp_path / "m.gguf").read_bytes(), random.Random(1)
    end = content.index(b"ffn_down.weight", content.index(b"blk.1.ffn_up")) + 60
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(end)] = rng.randrange(256)
        (tmp_path / "d.gguf").write_bytes(damaged)
        with contextlib.suppress(CheckpointError), open_checkpoint(tmp_path / "d.gguf") as checkpoint:
            assert sum(s.nbytes for s in checkpoint.specs.values()) < 4 * len(content)


def test_several_files_in_a_folder_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
