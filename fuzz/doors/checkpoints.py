"""Doors of checkpoints: headers of safetensors files, indexes of shards, configs, torch files."""

from __future__ import annotations

import io
import json
import math
import random
import struct
import zipfile
from functools import cache
from pathlib import Path

import torch
from safetensors import deserialize
from safetensors.torch import save

from actmat.checkpoints.header import read_header
from actmat.checkpoints.resolve import open_model
from actmat.experts.locate import locate
from actmat.layout.resolve import resolve_layout
from fuzz.doors.folder import in_folder, inspected
from fuzz.draw import json_text, mutated_bytes, pickled
from fuzz.harness import Files, door

DTYPES = ("F32", "BF16", "F16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "I4", "X")


@cache
def weights() -> bytes:
    """A small safetensors file."""
    return save({"model.a.weight": torch.ones(2, 3), "model.b": torch.zeros(4)}, {"format": "pt"})


def _header(rng: random.Random) -> Files:
    if rng.random() < 0.3:
        return {"header": mutated_bytes(rng, weights())}
    entries = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
               "b": {"dtype": rng.choice(DTYPES), "shape": [], "data_offsets": [24, 24 + rng.randrange(9)]},
               "__metadata__": {"format": "pt"}}  # fmt: skip
    text = json_text(rng, entries)
    length = len(text) if rng.random() < 0.9 else rng.choice((0, 2**20, 2**63, 2**64 - 1, len(text) + 1))
    return {"header": struct.pack("<Q", length) + text + bytes(rng.choice((24, 28, 32)))}


def _read_header(files: Files) -> None:
    """What is read tiles the file, and the reference implementation reads it alike."""
    content = files["header"]
    specs, _ = read_header(lambda at, n: content[at : at + n], len(content), file="x")
    reached = 8 + int.from_bytes(content[:8], "little")
    for spec in specs.values():
        assert spec.offset == reached
        reached += spec.nbytes
    assert reached == len(content)
    assert {n: tuple(t["shape"]) for n, t in deserialize(content)} == {n: s.shape for n, s in specs.items()}


def _opened(folder: Path) -> None:
    """Open a checkpoint, resolve its layout and read every tensor."""
    with open_model(folder) as checkpoint:
        resolve_layout(checkpoint.specs, checkpoint.config)
        for name in checkpoint.specs:
            checkpoint.tensors.read(name)


def _index(rng: random.Random) -> Files:
    index = {"metadata": {"total_size": 40},
             "weight_map": {"model.a.weight": "m.safetensors", "model.b": "m.safetensors"}}  # fmt: skip
    return {"model.safetensors.index.json": json_text(rng, index), "m.safetensors": weights()}


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True, "text_config": {"num_key_value_heads": 2},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "auto_map": {"AutoModel": "x.y"},
}  # fmt: skip
FAMILIES = ("gpt2", "phi3", "mixtral", "t5", "bert", "qwen2_moe", "clip", "falcon", "mamba", "x")
NAMES = (
    "model.embed_tokens.weight", "lm_head.weight", "transformer.h.0.attn.c_attn.weight", "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.experts.0.w1.weight", "model.layers.0.self_attn.qkv_proj.weight", "bn.running_var", "\x1b[2Jactmat: intact",
    "model.layers.0.input_layernorm.weight", "a" * 200 + " all good",
)  # fmt: skip


@cache
def _named_weights(first: str, second: str) -> bytes:
    return save({first: torch.ones(12, 8), second: torch.ones(12, 8)})


def _config(rng: random.Random) -> Files:
    config = dict(CONFIG)
    if rng.random() < 0.6:
        del config["quantization_config"]
    if rng.random() < 0.5:
        config["model_type"] = rng.choice(FAMILIES)
    return {"config.json": json_text(rng, config), "model.safetensors": _named_weights(*rng.sample(NAMES, 2))}


@cache
def torch_files() -> tuple[bytes, bytes, bytes]:
    """A small state dict as a zip file, as a legacy file, and its pickle."""
    out = []
    for as_zip in (True, False):
        file = io.BytesIO()
        content = {"a": torch.ones(2, 3), "b": torch.nn.Parameter(torch.zeros(4)), "c": torch.ones(6)[::2]}
        torch.save(content, file, _use_new_zipfile_serialization=as_zip)
        out.append(file.getvalue())
    return out[0], out[1], dict(_members())["archive/data.pkl"]


@cache
def _members() -> tuple[tuple[str, bytes], ...]:
    file = io.BytesIO()
    torch.save({"a": torch.ones(2, 3), "b": torch.zeros(4), "c": torch.ones(6)[::2]}, file)
    with zipfile.ZipFile(file) as archive:
        return tuple((n, archive.read(n)) for n in archive.namelist())


PICKLED = (
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"cbuiltins\neval\n", b"cos\nsystem\n",
    b"ccollections\nOrderedDict\n", b"X\x01\x00\x00\x00a", b"J\xff\xff\xff\x7f", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"X\x07\x00\x00\x00storage", b"(" * 50, b"]" * 50, b"\x85" * 50, b"K\x01",
)  # fmt: skip


def _torch_file(rng: random.Random) -> Files:
    as_zip, legacy, text = torch_files()
    kind = rng.random()
    if kind < 0.5:
        return {"m.pt": mutated_bytes(rng, as_zip if kind < 0.25 else legacy)}
    text = mutated_bytes(rng, text) if kind < 0.75 else b"\x80\x02" + pickled(rng, PICKLED)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED) as archive:
        for name, content in _members():
            if rng.random() < 0.03:
                continue
            archive.writestr(name, text if name.endswith("data.pkl") else content)
    return {"m.pt": file.getvalue()}


def _read_torch(folder: Path) -> None:
    locate(folder / "m.pt").close()
    _opened(folder / "m.pt")


@cache
def gguf_file() -> bytes:
    """A small GGUF file of two tensors, one of them quantized."""
    texts = {"general.architecture": "llama"}
    numbers = {"llama.block_count": 1, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    entries = [text(k) + struct.pack("<I", 8) + text(v) for k, v in texts.items()]
    entries += [text(k) + struct.pack("<II", 4, v) for k, v in numbers.items()]
    entries.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"))
    tensors = [text("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 32, 8, 8, 0),
               text("output_norm.weight") + struct.pack("<IQIQ", 1, 4, 0, 288)]  # fmt: skip
    start = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    head = start + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(8 * 34 + 16) + bytes(16)


def _gguf(rng: random.Random) -> Files:
    return {"m.gguf": mutated_bytes(rng, gguf_file())}


QUANTIZED = (
    ("a.weight", torch.float8_e4m3fn, (6, 8)), ("a.weight_scale_inv", torch.float32, (2, 1)), ("a.weight_scale", torch.float32, (6, 1)),
    ("a.scale_weight", torch.float32, ()), ("a.weight_zero_point", torch.int32, (1, 1)), ("a.weight_g_idx", torch.int32, (8,)),
    ("a.weight_packed", torch.int32, (6, 1)), ("a.weight_shape", torch.int64, (2,)), ("a.qweight", torch.int32, (2, 8)),
    ("a.qzeros", torch.int32, (1, 1)), ("a.scales", torch.float16, (1, 8)), ("a.g_idx", torch.int32, (16,)),
    ("b_blocks", torch.uint8, (2, 3, 1, 16)), ("b_scales", torch.uint8, (2, 3, 1)), ("c.weight", torch.uint8, (16, 1)),
    ("c.weight.absmax", torch.float32, (1,)), ("c.weight.quant_map", torch.float32, (16,)), ("d.weight", torch.int8, (4, 4)),
    ("d.SCB", torch.float32, (4,)), ("d.weight_scale", torch.bfloat16, (4, 2)), ("e.weight_packed", torch.uint8, (3, 16)),
    ("e.weight_scale", torch.float8_e4m3fn, (3, 2)), ("e.weight_global_scale", torch.float32, (1,)),
    ("f.weight_packed", torch.uint8, (3, 16)), ("f.weight_scale", torch.uint8, (3, 1)),
)  # fmt: skip
STATE = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [4, 8], "nested_blocksize": 4}
METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "bitsandbytes", "mxfp4", "", "x")


@cache
def _digits(dtype: torch.dtype) -> tuple[str, bytes, int]:
    """The name of a dtype in headers, 320 entries of 0, 1 and 2, and the bytes of an entry."""
    values = torch.randint(3, (320,), generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = save({"x": values})
    size = values.element_size()
    label = json.loads(stored[8 : 8 + struct.unpack("<Q", stored[:8])[0]])["x"]["dtype"]
    return str(label), stored[-320 * size :], size


def _joined(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file, without the time that its library takes."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(data)]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def _quantized(rng: random.Random) -> Files:
    """Parts of several layouts together, some missing, some of another shape."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, dtype, shape in QUANTIZED:
        if rng.random() < 0.15:
            continue
        own = tuple(n if rng.random() < 0.95 else rng.choice((0, 1, 3, 64)) for n in shape)
        label, digits, size = _digits(dtype)
        count, start = math.prod(own), rng.randrange(32)
        tensors[name] = label, own, (digits * (1 + count // 256))[start * size : (start + count) * size]
    text = json_text(rng, STATE) if rng.random() < 0.8 else b""
    tensors["c.weight.quant_state.bitsandbytes__nf4"] = "U8", (len(text),), text
    weights = {"weights": {"num_bits": rng.choice((4, 4, 8, 3)), "type": "int"}}
    entry = {"quant_method": rng.choice(METHODS), "weight_block_size": [rng.choice((3, 128, 0)), 8], "bits": 4,
             "config_groups": {"group_0": weights}}  # fmt: skip
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": entry}
    return {"config.json": json_text(rng, config), "model.safetensors": _joined(tensors)}


door("headers", _header, _read_header)
door("indexes", _index, in_folder(_opened))
door("configs", _config, in_folder(inspected))
door("torch files", _torch_file, in_folder(_read_torch))
door("gguf files", _gguf, in_folder(_opened))
door("quantized checkpoints", _quantized, in_folder(_opened))
