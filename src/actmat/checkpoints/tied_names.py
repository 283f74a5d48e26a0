"""Names of tensors that architectures may tie to another one: output heads, their biases, and shared tables."""

from __future__ import annotations

from collections.abc import Sequence

_OUTPUT_HEADS = """
lm_head.weight embed_out.weight cls.predictions.decoder.weight predictions.decoder.weight lm_head.decoder.weight
generator_lm_head.weight vocab_projector.weight proj_out.weight output_projection.weight pred_layer.proj.weight
lm_loss.weight decoder.weight output.weight
"""
OUTPUT_HEADS = _OUTPUT_HEADS.split()
"""Ends of names of output heads over the vocabulary."""

_TOKEN_TABLES = """
shared.weight embed_tokens.weight wte.weight word_embeddings.weight tok_embeddings.weight tokens_embed.weight
embed_in.weight word_embedding.weight embeddings.weight embedding.weight transformer.w.weight
"""
TOKEN_TABLES = _TOKEN_TABLES.split()
"""Ends of names of token embeddings."""

HEAD_BIASES = (
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("predictions.decoder.bias", "predictions.bias"),
    ("lm_head.decoder.bias", "lm_head.bias"),
)
SHARED_BY = [f"{part}.embed_tokens.weight" for part in ("text_encoder", "text_decoder", "encoder", "decoder")]


def may_be_tied(name: str) -> bool:
    """True for the name of a tensor that some architecture ties to another.

    >>> may_be_tied("lm_head.weight"), may_be_tied("model.norm.weight")
    (True, False)
    """
    return end_of(name, (*OUTPUT_HEADS, *TOKEN_TABLES, *SHARED_BY, *(bias for bias, _ in HEAD_BIASES))) is not None


def end_of(name: str, ends: Sequence[str]) -> str | None:
    """The first of these ends that a name has, at the start of one of its parts."""
    if not name.endswith(tuple(ends)):  # nearly all names
        return None
    return next((end for end in ends if name.endswith(end) and f".{name}".endswith(f".{end}")), None)
