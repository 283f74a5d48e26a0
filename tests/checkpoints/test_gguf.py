"""GGUF files, written by the package gguf, against what transformers loads of them; and damaged ones."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.gguf_files import HEADS, INNER, KV_HEADS, LAYERS, VOCAB, WIDTH, writer_of, written
from tests.helpers.merging import loaded_whole

import actmat
from actmat import merge
from actmat.checkpoints.resolve import open_handle, open_model, open_tensors
from actmat.errors import CheckpointError, MergeError
from actmat.extras.collect.collect import bound
from actmat.extras.gguf.file import QUANTIZED, GgufFolder
from actmat.extras.gguf.header import VOCABULARY, read_gguf_header
from actmat.extras.models.loading import Loaded, from_files, load_model

BIASES = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2, "attn_output": WIDTH}


def shapes(architecture: str = "llama") -> dict[str, tuple[int, ...]]:
    kv = WIDTH * KV_HEADS // HEADS
    others = {
        "phi3": {"attn_qkv": (WIDTH + 2 * kv, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_up": (2 * INNER, WIDTH)},
        "gemma2": {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)},
        "gemma3": {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,), "attn_q_norm": (WIDTH // HEADS,),
                   "attn_k_norm": (WIDTH // HEADS,)},
    }  # fmt: skip
    dropped = ("attn_q", "attn_k", "attn_v", "ffn_gate") if architecture == "phi3" else ()
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        found |= {f"blk.{i}.{n}.weight": s for n, s in {
            "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH),
            "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER), **others.get(architecture, {})}.items() if n not in dropped}  # fmt: skip
    return found


def write_gguf(
    file: Path,
    kind: str = "Q8_0",
    architecture: str = "llama",
    seed: int = 0,
    biases: tuple[str, ...] = (),
    tokens: Sequence[str] = (),
    **extra: Any,
) -> Path:
    """A tiny model whose matrices are of this type; `biases`: layers of the attention that have one."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    writer = writer_of(file, architecture)
    writer.add_name("tiny")
    writer.add_token_list(tokens or [f"t{i}" for i in range(VOCAB)])
    if tokens:
        writer.add_tokenizer_model("gpt2")
    for key, value in extra.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key.replace("__", "."), value)
    rng = np.random.default_rng(seed)
    added = {f"blk.{i}.{n}.bias": (BIASES[n],) for i in range(LAYERS) for n in biases}
    for name, shape in (shapes(architecture) | added).items():
        data = rng.standard_normal(shape).astype(np.float32)
        own = GGMLQuantizationType["F32" if len(shape) == 1 else kind]
        stored = data.astype(np.float16) if own.name == "F16" else quantize(data, own) if own.name != "F32" else data
        writer.add_tensor(name, stored, raw_dtype=own)
    written(writer)
    return file


LOADED = [
    ("Q8_0", "llama"),
    ("Q4_0", "qwen2"),
    ("F16", "llama"),
    ("Q8_0", "phi3"),
    ("Q8_0", "gemma2"),
    ("Q4_0", "gemma3"),
]


@pytest.mark.parametrize(("kind", "architecture"), LOADED)
def test_tensors_and_config_are_those_that_transformers_loads(kind: str, architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    special = {f"tokenizer__ggml__{k}_token_id": 1 for k in ("bos", "eos", "padding")}
    file = write_gguf(tmp_path / "m.gguf", kind, architecture, **special)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight" and "rotary" not in n}
    with open_model(file) as checkpoint, open_handle(checkpoint.tensors.handle()) as again:
        # a qwen2 model has biases that this file lacks
        assert set(checkpoint.specs) == {n for n in state if not n.endswith("bias")}
        assert again.specs == checkpoint.specs
        for name, spec in checkpoint.specs.items():
            found = checkpoint.tensors.read(name)
            assert torch.equal(found, state[name].to(found.dtype)), name
            out = memoryview(bytearray(spec.nbytes - 3))
            again.read_into(name, 3, out)
            assert out == bytes(found.view(torch.uint8).flatten().tolist())[3:]
            assert (checkpoint.tensors.parts(name)[1] == f"GGUF {kind}") == (spec.dtype == "bfloat16")
        config = checkpoint.config or {}
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                      "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "model_type",
                      "max_position_embeddings"):  # fmt: skip
            wanted = getattr(model.config, field)
            assert config[field] == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), field


def test_a_gguf_runs_as_the_checkpoint_that_is_merged(tmp_path: Path) -> None:
    special = {f"tokenizer__ggml__{k}_token_id": 1 for k in ("bos", "eos", "padding")}
    loaded = load_model(str(write_gguf(tmp_path / "base.gguf", **special)))
    with open_model(tmp_path / "base.gguf") as checkpoint, bound(loaded.model, checkpoint, None) as binding:
        stored = {piece.name for place in binding.located.values() for piece in place.slices}
        assert stored == set(checkpoint.specs), "all are found in the model, with equal values"


def test_the_tokenizer_of_a_file_is_converted(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    writer = writer_of(tmp_path / "m.gguf", "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c", "\u0120", "ab", "\u0120c", "<end>"])
    writer.add_token_types([1, 1, 1, 1, 1, 1, 3])
    writer.add_token_merges(["a b", "\u0120 c"])
    writer.add_eos_token_id(6)
    written(writer)
    files = GgufFolder(file=tmp_path / "m.gguf").converted_tokenizer()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("ab c") == [4, 5]
    assert tokenizer.eos_token == "<end>"
    run = from_files("AutoTokenizer", Loaded(torch.nn.Module(), "base", None, str(tmp_path / "m.gguf")))
    assert run.encode("ab c") == [4, 5], "of the file itself, for a model that runs on inputs"
    none = GgufFolder(file=write_gguf(tmp_path / "none.gguf"))
    assert none.converted_tokenizer() == {}, "a list of tokens without a model of them"


@pytest.mark.parametrize(
    ("swapped", "words"),
    [(False, ""), (True, "have different tokens in 2 rows"), (None, "tokenizer.json: the experts agree")],
)
def test_tokens_of_a_gguf_base_are_compared(swapped: bool | None, words: str, tmp_path: Path) -> None:
    """Rows mean the same tokens as in the experts; rows of padding mean none."""
    tokens = [f"w{i}" for i in range(VOCAB - 2)] + [f"[PAD{i}]" for i in (VOCAB - 2, VOCAB - 1)]
    base = write_gguf(tmp_path / "base.gguf", tokens=tokens)
    with open_model(base) as checkpoint:
        assert checkpoint.folder.tokens() == [*tokens[:-2], "", ""]
        expert = save_folder(tmp_path / "expert", {n: checkpoint.tensors.read(n) for n in checkpoint.specs}, None)
    if swapped:
        tokens[3], tokens[4] = tokens[4], tokens[3]
    vocabulary = {t: i for i, t in enumerate(tokens[:-2])} | ({"<new>": VOCAB - 2} if swapped is None else {})
    (expert / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    try:
        found = " ".join(n.text for n in actmat.plan(base, [expert], method="average").notes)
    except MergeError as error:
        found = f"{error}"
    assert words in found
    assert bool(swapped) == ("different tokens" in found)


@pytest.mark.parametrize(
    ("number", "said"), [(2, []), (3, ["headers differ in tokenizer.ggml.eos_token_id ('expert.gguf')"])]
)
def test_settings_in_headers_that_differ_are_said(number: int, said: list[str], tmp_path: Path) -> None:
    """Templates, numbers of special tokens, and all else on the tokenizer but lists, which are compared as tokens."""
    base = write_gguf(tmp_path / "base.gguf", tokenizer__ggml__eos_token_id=2)
    expert = write_gguf(tmp_path / "expert.gguf", seed=1, tokenizer__ggml__eos_token_id=number)
    notes = [n.text for n in actmat.plan(base, [expert], method="average").notes if n.text.startswith("headers")]
    assert notes == [f"{text}: those of the base are written" for text in said]
    merged = actmat.merge(base, [expert], method="average", out=tmp_path / "out")
    assert any("tokenizer in the base's header cannot be converted" in n.text for n in merged.plan.notes)


def in_pairs(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp's converter writes them (`LlamaModel.permute`), transcribed for weights and biases."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    turned: np.ndarray[Any, Any] = halves.swapaxes(1, 2).reshape(weights.shape)
    return turned


def test_biases_of_a_llamas_attention_are_put_in_order(tmp_path: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    base = write_gguf(tmp_path / "base.gguf", "F16", biases=tuple(BIASES))
    stored = {t.name: np.array(t.data) for t in GGUFReader(base).tensors}
    with open_model(base) as checkpoint:
        tensors = {n: checkpoint.tensors.read(n) for n in checkpoint.specs}
        part = memoryview(bytearray(8))
        checkpoint.tensors.read_into("model.layers.1.self_attn.k_proj.bias", 4, part)
    for layer, heads in (("q", HEADS), ("k", KV_HEADS)):
        for end in ("weight", "bias"):
            found = tensors[f"model.layers.1.self_attn.{layer}_proj.{end}"].numpy()
            assert np.array_equal(in_pairs(found, heads), stored[f"blk.1.attn_{layer}.{end}"]), (layer, end)
    bias = tensors["model.layers.1.self_attn.k_proj.bias"]
    assert bytes(part) == bias[1:3].numpy().tobytes()
    assert np.array_equal(tensors["model.layers.0.self_attn.v_proj.bias"].numpy(), stored["blk.0.attn_v.bias"])
    merge(base, [save_folder(tmp_path / "expert", tensors, None)], out=tmp_path / "out", method="average")
    model = loaded_whole(AutoModelForCausalLM, tmp_path / "out", dtype=torch.float32)
    assert model.config.attention_bias is True
    assert torch.equal(model.state_dict()["model.layers.1.self_attn.k_proj.bias"], bias)


def test_a_config_of_some_biases_is_not_written(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", biases=("attn_q", "attn_k", "attn_v"))) as checkpoint:
        assert checkpoint.folder.written == {}
        assert "some layers of a kind" in checkpoint.folder.notes[0].text
        assert "model.layers.0.self_attn.q_proj.bias" in checkpoint.specs


def split(file: Path, parts: int) -> list[Path]:
    """The file in parts, as llama.cpp's gguf-split writes them."""
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(file)
    size = -(-len(reader.tensors) // parts)
    out = []
    for k in range(parts):
        path = file.with_name(f"{file.stem}-{k + 1:05d}-of-{parts:05d}.gguf")
        writer = writer_of(path) if k == 0 else GGUFWriter(path, "llama")
        writer.add_uint16("split.no", k)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[k * size : (k + 1) * size]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        written(writer)
        out.append(path)
    file.unlink()
    return out


def test_split_files_are_one_model(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    write_gguf(tmp_path / "whole" / "m.gguf")
    write_gguf(tmp_path / "m.gguf")
    parts = split(tmp_path / "m.gguf", 3)
    with open_tensors(tmp_path / "whole") as whole:
        for place in (tmp_path / parts[0].name, tmp_path / parts[2].name):
            with open_model(place) as found, open_handle(found.tensors.handle()) as again:
                assert found.specs.keys() == whole.specs.keys()
                assert [i.path.rpartition("/")[2] for i in found.tensors.identity()] == [p.name for p in parts]
                assert all(torch.equal(again.read(n), whole.read(n)) for n in whole.specs)
                assert (found.config or {})["num_attention_heads"] == HEADS
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in parts:
        part.rename(folder / part.name)
    with open_model(folder) as found:
        assert len(found.specs) == len(shapes())
    (folder / parts[1].name).rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"without m-00002-of-00003\.gguf"):
        open_tensors(folder)
    (folder / parts[1].name).write_bytes((folder / parts[2].name).read_bytes())
    with pytest.raises(CheckpointError, match="are inconsistent") as raised:
        open_tensors(folder)
    assert any("file 2 is numbered 3" in p for p in raised.value.problems)
    assert any("a tensor is in two files" in p for p in raised.value.problems)


@pytest.mark.parametrize(("architecture", "extra", "says"), [
    ("gemma2", {}, "a complete config"), ("llama", {"llama__rope__scaling__type": 1}, "rotary embeddings are scaled"),
])  # fmt: skip
def test_a_config_that_the_metadata_do_not_have_is_not_written(
    architecture: str, extra: dict[str, int], says: str, tmp_path: Path
) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "Q8_0", architecture, **extra)) as found:
        assert found.folder.written == {}
        assert says in found.folder.notes[0].text
        assert found.config is not None


@pytest.mark.parametrize("kind", QUANTIZED)
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
        ({"architecture": "gemma"}, "found 'gemma'"),
        ({"split__count": 2}, "file 1 belongs to 2 parts, but 1 are present"),
        ({"general__type": "adapter"}, "found one of type 'adapter'"),
        ({"general__type": "imatrix"}, "found one of type 'imatrix'"),
    ],
)
def test_files_that_are_not_read_are_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        open_tensors(write_gguf(tmp_path / "m.gguf", **change))


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf").read_bytes()
    key = b"llama.attention.head_count_kv" + struct.pack("<I", 4)
    (tmp_path / "m.gguf").write_bytes(content.replace(key + struct.pack("<I", KV_HEADS), key + struct.pack("<I", 7)))
    with pytest.raises(CheckpointError, match="7 heads"):
        open_tensors(tmp_path / "m.gguf")


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
        (
            header(text(VOCABULARY) + struct.pack("<IIQ", 9, 8, 2_200_000) + bytes(8 * 2_200_000)),
            "a text of 0, more than",
        ),
        (header(text("w") + struct.pack("<I", 99), tensors=1, count=0), "99 axes"),
        (header(text("w") + struct.pack("<I", 1) + HUGE, tensors=1, count=0), "an axis"),
    ],
)
def test_hostile_headers_are_refused(content: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_gguf_header(lambda at, n: content[at : at + n], len(content), file="m.gguf")


def test_only_tokens_are_kept_of_lists_of_texts() -> None:
    content = header(*(text(k) + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b") for k in ("x", VOCABULARY)))
    found = read_gguf_header(lambda at, n: content[at : at + n], len(content), file="m.gguf")
    assert [(v.count, v.texts) for v in found.metadata.values()] == [(2, ()), (2, ("a", "b"))]


def test_tensors_beyond_the_file_or_in_each_other_are_refused(tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    (tmp_path / "short.gguf").write_bytes(content[:-4000])
    with pytest.raises(CheckpointError, match="beyond the file"):
        open_tensors(tmp_path / "short.gguf")
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    content[at : at + 8] = struct.pack("<Q", 0)
    (tmp_path / "overlap.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="overlap another tensor"):
        open_tensors(tmp_path / "overlap.gguf")


def test_several_files_in_a_folder_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_tensors(tmp_path)
