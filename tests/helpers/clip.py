"""A tiny CLIP on disk."""

import json
from pathlib import Path


def write_clip(folder: Path, size: int = 32) -> Path:
    """A tiny CLIP with its tokenizer: every character is a token."""
    import torch
    from tests.helpers.tinymodels import made
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True)
    letters = [chr(c) for c in range(33, 127)]
    tokens = [*letters, *(c + "</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(tokens), "max_position_embeddings": 128}
    text |= {"bos_token_id": 188, "eos_token_id": 189, "pad_token_id": 189}
    vision = {**sizes, "image_size": size, "patch_size": 16}
    with torch.random.fork_rng(devices=[]):
        made("clip", text_config=text, vision_config=vision, projection_dim=12).save_pretrained(folder)
    return folder
