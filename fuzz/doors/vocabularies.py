"""Door of vocabularies: the `tokenizer.json` of a base and of an expert, whose rows are put into one order; pieces."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from actmat.checkpoints.resolve import open_model
from actmat.checkpoints.sentencepiece import pieces
from actmat.errors import MergeError
from actmat.extras.vocabulary.align import align_vocabularies
from actmat.recipe.output import Vocabulary
from fuzz.doors.folder import in_folder
from fuzz.draw import json_text, text
from fuzz.harness import Files, door

TOKENS = ("a", "b", "ab", "<s>", "</s>", "\u0120the", "<|im_end|>")
ROWS = 8


@cache
def _weights(rows: int) -> bytes:
    table = torch.arange(4.0 * rows).reshape(rows, 4)
    return save(
        {"model.embed_tokens.weight": table, "lm_head.weight": table.clone(), "model.norm.weight": torch.ones(4)}
    )


def _tokenizer(rng: random.Random) -> bytes:
    tokens = rng.sample(TOKENS, rng.randrange(2, len(TOKENS) + 1))
    pairs = {token: k for k, token in enumerate(tokens)}
    vocab = pairs if rng.random() < 0.7 else [[token, -float(k)] for token, k in pairs.items()]
    added = [{"id": len(tokens), "content": "<pad>", "special": True}] if rng.random() < 0.5 else []
    data = {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]}}
    return json_text(rng, data) if rng.random() < 0.7 else json.dumps(data).encode()


def _case(rng: random.Random) -> Files:
    files = {f"{of}.tokenizer.json": _tokenizer(rng) for of in ("base", "expert")}
    files["tokenizer.model"] = b"".join(b"\n%c\n%c%s" % (len(t) + 2, len(t), t) for t in map(str.encode, TOKENS))
    config = {"model_type": "llama", "vocab_size": ROWS, "eos_token_id": 1, "tie_word_embeddings": False}
    files |= {f"{of}.config.json": json_text(rng, config) if rng.random() < 0.1 else json.dumps(config).encode()
              for of in ("base", "expert")}  # fmt: skip
    tokens = {} if rng.random() < 0.7 else {text(rng): {"source": rng.choice(("base", "expert", text(rng)))}}
    policy = {"source": rng.choice(("base", "union", "expert")), "tokens": tokens}
    policy |= {"pad_to_multiple_of": rng.choice((8, 64, 3))} if rng.random() < 0.2 else {}
    return files | {"policy": json.dumps(policy).encode(), "rows": str(rng.choice((ROWS, ROWS, 3))).encode()}


def _read(folder: Path) -> str:
    pieces((folder / "tokenizer.model").read_bytes() if (folder / "tokenizer.model").exists() else b"")
    for of in ("base", "expert"):
        (folder / of).mkdir()
        for name in ("tokenizer.json", "config.json"):
            (folder / f"{of}.{name}").rename(folder / of / name)
        (folder / of / "model.safetensors").write_bytes(_weights(int((folder / "rows").read_text())))
    try:
        policy = Vocabulary.model_validate_json((folder / "policy").read_bytes())
    except ValueError as error:
        raise MergeError("The recipe's 'vocabulary' is wrong.") from error
    with open_model(folder / "base") as base, open_model(folder / "expert") as expert:
        aligned, others, _ = align_vocabularies(base, {"expert": expert}, policy)
        for model in (aligned, *others.values()):
            for name in model.specs:
                model.tensors.read(name)
        return "\n".join(
            [*map(str, aligned.folder.notes), *map(str, others["expert"].folder.notes), *aligned.folder.texts]
        )


door("vocabularies", _case, in_folder(_read))
