"""all-MiniLM-L6-v2 in plain torch, with its tokenizer: the pretrained encoder of the demo's second half.

A BERT of 22.7 M weights, 384 wide, 6 layers. Its feature of a text is the mean of the last hidden states over tokens.
Shapes: `N` texts, `L` tokens, `D` features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Encoder", "Words"]

_BATCH = 50
_PIECE = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")


class Words:
    """Texts to tokens: lower case, and the longest pieces of each word that the vocabulary has.

    For texts in ASCII; accents are not taken off.

    Args:
        vocabulary: file with a piece per line.
        longest: tokens of a text with its two ends; what goes on is cut off.
    """

    def __init__(self, vocabulary: Path, longest: int = 48) -> None:
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self._ids, self._longest = {piece: i for i, piece in enumerate(lines)}, longest

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Token ids, `N L`; 0 where a text has ended."""
        rows = [[self._ids["[CLS]"], *self._tokens(text)[: self._longest - 2], self._ids["[SEP]"]] for text in texts]
        ids_NL = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row_L, row in zip(ids_NL, rows, strict=True):
            row_L[: len(row)] = torch.tensor(row)
        return ids_NL

    def _tokens(self, text: str) -> list[int]:
        return [token for word in _PIECE.findall(text.lower()) for token in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            ends = range(len(word), start, -1)
            pieces = (("##" if start else "") + word[start:end] for end in ends)
            known = next((p for p in pieces if p in self._ids), None)
            if known is None:
                return [self._ids["[UNK]"]]
            found.append(self._ids[known])
            start += len(known.removeprefix("##")) if start else len(known)
        return found


class Encoder:
    """The encoder, from texts as token ids to features.

    Args:
        config: text of the checkpoint's `config.json`.
        weights: by name.
    """

    def __init__(self, config: str, weights: Mapping[str, Tensor]) -> None:
        self._config, self.weights = config, dict(weights)
        read = json.loads(config)
        self._n_heads, self._epsilon = int(read["num_attention_heads"]), float(read["layer_norm_eps"])
        self._n_layers = int(read["num_hidden_layers"])

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """Read a checkpoint."""
        config = (folder / "config.json").read_text(encoding="utf-8")
        return cls(config, load_file(folder / "model.safetensors"))

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `actmat merge` reads, and transformers."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(self._config, encoding="utf-8")
        tensors = {name: weight.detach().contiguous() for name, weight in self.weights.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def without(self, prefix: str) -> Encoder:
        """The encoder without the weights whose names begin so, and without positions that are counted anew."""
        kept = {n: w for n, w in self.weights.items() if not n.startswith(prefix) and w.is_floating_point()}
        return Encoder(self._config, kept)

    def copy(self) -> Encoder:
        """The same encoder, with weights of its own."""
        return Encoder(self._config, {name: weight.clone() for name, weight in self.weights.items()})

    def trained(self, prefix: str) -> list[nn.Parameter]:
        """Ask for gradients of the weights whose names begin so; these weights."""
        found = {n: nn.Parameter(weight) for n, weight in self.weights.items() if n.startswith(prefix)}
        self.weights |= found
        return list(found.values())

    @torch.no_grad()
    def features(self, ids_NL: Tensor) -> Tensor:
        """`N L -> N D`, without gradients, in batches that fit a cache."""
        return torch.cat([self(batch) for batch in torch.split(ids_NL, _BATCH)])

    def __call__(self, ids_NL: Tensor) -> Tensor:
        """`N L -> N D`."""
        ids_NL = ids_NL[:, : int((ids_NL != 0).sum(1).max())]
        mask_NL, at = ids_NL != 0, "embeddings."
        x_NLD = (
            self.weights[at + "word_embeddings.weight"][ids_NL]
            + self.weights[at + "position_embeddings.weight"][: ids_NL.shape[1]]
            + self.weights[at + "token_type_embeddings.weight"][0]
        )
        x_NLD = self._norm(x_NLD, at + "LayerNorm")
        for number in range(self._n_layers):
            at = f"encoder.layer.{number}."
            query, key, value = (
                self._split(self._linear(x_NLD, f"{at}attention.self.{part}")) for part in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_NL[:, None, None])
            mixed_NLD = self._linear(mixed.transpose(1, 2).flatten(2), at + "attention.output.dense")
            x_NLD = self._norm(x_NLD + mixed_NLD, at + "attention.output.LayerNorm")
            inner = functional.gelu(self._linear(x_NLD, at + "intermediate.dense"))
            x_NLD = self._norm(x_NLD + self._linear(inner, at + "output.dense"), at + "output.LayerNorm")
        mask_NL1 = mask_NL.unsqueeze(-1).to(x_NLD.dtype)
        return (x_NLD * mask_NL1).sum(1) / mask_NL1.sum(1)

    def _split(self, x_NLD: Tensor) -> Tensor:
        """One row of features per head."""
        n, length, _ = x_NLD.shape
        return x_NLD.view(n, length, self._n_heads, -1).transpose(1, 2)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self._epsilon)
