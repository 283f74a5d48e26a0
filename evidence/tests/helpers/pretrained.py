"""Small stand-ins for the pretrained checkpoints: a ViT as an exporter of ONNX leaves it, a BERT, wheels, and texts."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import torch

from actmat_experiments.pretrained.wheels import Wheel

TEXTS = ("trec", "agnews", "mr", "custrev", "mpqa", "subj")
WORDS = ("river", "stone", "bridge", "window", "garden", "music", "paper", "winter", "orange", "silver")


def made(kind: str, loader: str = "AutoModelForCausalLM", **fields: Any) -> Any:
    """The model that transformers makes of a config, with fixed weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, hidden_size=16, num_attention_heads=2, **fields)
    return getattr(transformers, loader).from_config(config).eval()


def write_vit(folder: Path) -> Any:
    """A tiny `Dinov2Model` as a checkpoint."""
    sizes = {"num_hidden_layers": 2, "mlp_ratio": 2, "image_size": 24, "patch_size": 8}
    model = made("dinov2", "AutoModel", use_mask_token=False, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def write_graph(checkpoint: Path, path: Path, *, without: str = "") -> None:
    """The tensors of a checkpoint as an ONNX graph with the names that PyTorch's exporter gives them.

    Args:
        without: part of the name of tensors that are left out.
    """
    import onnx
    from onnx import helper, numpy_helper
    from safetensors.torch import load_file

    constants, nodes = [], []
    for number, (name, tensor) in enumerate(load_file(checkpoint / "model.safetensors").items()):
        if without and without in name:
            continue
        if name == "embeddings.position_embeddings":
            for kind, part in (("Concat", tensor[:, :1]), ("Reshape", tensor[:, 1:])):
                constants.append(numpy_helper.from_array(part.contiguous().numpy(), f"onnx::{kind}_{number}"))
                node = f"/backbone/embeddings/{kind}"
                nodes.append(helper.make_node(kind, [f"onnx::{kind}_{number}", "x"], [f"{kind}"], name=node, axis=1))
        elif name.endswith(".weight") and tensor.dim() == 2:
            anonymous, module = f"onnx::MatMul_{number}", name.removesuffix(".weight").replace(".", "/")
            constants.append(numpy_helper.from_array(tensor.mT.contiguous().numpy(), anonymous))
            node = f"/backbone/{module}/MatMul"
            nodes.append(helper.make_node("MatMul", [f"in{number}", anonymous], [f"out{number}"], name=node))
        else:
            constants.append(numpy_helper.from_array(tensor.numpy(), f"backbone.{name}"))
    constants.append(numpy_helper.from_array(torch.zeros(3).numpy(), "decoder.bias"))
    onnx.save(helper.make_model(helper.make_graph(nodes, "encoder", [], [], constants)), str(path))


def write_bert(folder: Path, kind: str = "Bert") -> Path:
    """A tiny BERT (or MPNet) with a pooler and its tokenizer."""
    import transformers

    folder.mkdir(parents=True)
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters), *WORDS]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    getattr(transformers, f"{kind}TokenizerFast")(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"vocab_size": len(tokens) + 5, "max_position_embeddings": 48, "num_hidden_layers": 1}
    made(kind.lower(), "AutoModel", intermediate_size=24, **sizes).save_pretrained(folder)
    return folder


def write_texts(folder: Path, n: int = 60) -> Path:
    """Files of all text tasks: a label has a word of its own among others."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for file in TEXTS:
        for part, size in (("train", n), ("test", n // 2)):
            lines = []
            for i in range(size):
                words = [WORDS[k] for k in torch.randint(2, len(WORDS), (9,), generator=generator).tolist()]
                words[i % 9] = WORDS[i % 2]
                lines.append(json.dumps({"text": " ".join([*words, f"{part[1]}" * (i % 7)]).strip(), "label": i % 2}))
            (folder / f"{file}.{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_wheel(path: Path, files: dict[str, bytes], folder: str) -> Wheel:
    """A wheel of these files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("stand-in", "1.0", path.name, sha256, folder, "none")


def write_llama(folder: Path) -> Path:
    """A tiny Llama whose tokenizer has one token per character, and those of the chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    characters = [chr(c) for c in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate([*special, *characters, "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    words = {"unk_token": "<unk>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<|im_start|>"],
        model_input_names=["input_ids", "attention_mask"], **words,
    ).save_pretrained(folder)  # fmt: skip
    small_decoder("llama", len(vocabulary), num_hidden_layers=1).save_pretrained(folder)
    return folder


def small_decoder(kind: str, words: int, **fields: Any) -> Any:
    """A decoder for the tokenizer of `write_llama`."""
    ids = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": words, "intermediate_size": 24, "num_key_value_heads": 1}
    return made(kind, tie_word_embeddings=True, **ids, **sizes, **fields)


def write_gguf(checkpoint: Path, path: Path, head: torch.Tensor | None = None) -> None:
    """The weights of a tiny Llama as a GGUF file, with a tokenizer of bytes.

    Args:
        head: a head of its own.
    """
    from gguf import GGUFWriter
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"] - 2)] + ["a", "aa"])
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    parts |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    parts |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    if head is not None:
        writer.add_tensor("output.weight", head.numpy())
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in whole:
            writer.add_tensor(f"{whole[stem]}.weight", tensor.numpy())
            continue
        _, _, layer, *_, last = stem.split(".")
        if last in ("q_proj", "k_proj"):  # halves of every head, interleaved
            n = heads if last == "q_proj" else shared
            tensor = tensor.view(n, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"blk.{layer}.{parts[last]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
