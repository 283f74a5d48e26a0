"""Gates of a mixture: rows of the routers, computed from prompts with the base model, or random.

As in mergekit, an expert's gate is the hidden state of the last token before each layer, averaged over its prompts,
minus that of the negative prompts, scaled to norm 1. The same file gives the same gates in every process.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint
from actmat.errors import CheckpointError
from actmat.extras.mergekit.mixtures.config import RANDOM, RUNS, Mixture
from actmat.extras.models.loading import extra, load_model, local_files

EMBEDDINGS = "model.embed_tokens.weight"
NEARLY_ZERO = 1e-8
"""Lower bound of the norm in divisions."""
DEGENERATE = 5.0
"""Condition number of a router's rows above which mergekit warns."""

_lock = threading.Lock()
_known: dict[Any, Tensor] = {}
"""Gates of this process's last mixture, cached for its workers so that the base model runs once."""


def gates_of(mixture: Mixture, base: Checkpoint, n_layers: int, hidden_size: int) -> Tensor:
    """Rows of the routers, `layers x gated experts x hidden size`.

    Raises:
        MergeError: the base model or its tokenizer cannot be loaded.
    """
    key = (mixture, base.location, base.identity(), n_layers, hidden_size)
    with _lock:
        if key not in _known:
            made = _random(mixture, n_layers, hidden_size) if mixture.gate_mode in RANDOM else _read(mixture, base)
            if made.shape != (n_layers, len(mixture.gated), hidden_size):
                raise CheckpointError(
                    f"{base.location}: expected states of {n_layers} layers of size {hidden_size}, as its config says; "
                    f"found {tuple(made.shape)}"
                )
            _warn_of_degenerate(made)
            _known.clear()
            _known[key] = made
        return _known[key]


def _warn_of_degenerate(gates: Tensor) -> None:
    """Warn, like mergekit, about layers whose router can hardly distinguish the experts."""
    layers = [str(i) for i, rows in enumerate(gates) if float(torch.linalg.cond(rows.float())) > DEGENERATE]
    if layers:
        named = "all layers" if len(layers) == len(gates) else f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"
        warnings.warn(
            f"the gates of {named} are nearly alike (condition number above {DEGENERATE:g}), so that some experts will "
            "hardly be used. Likely cause: prompts that are too similar",
            UserWarning,
            stacklevel=2,
        )


def _random(mixture: Mixture, n_layers: int, hidden_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(mixture.seed)
    shape = (n_layers, len(mixture.gated), hidden_size)
    if mixture.gate_mode == "random":
        return torch.randn(shape, generator=generator)
    bound = math.sqrt(1.0 / hidden_size)
    return torch.rand(shape, generator=generator) * 2 * bound - bound


def _read(mixture: Mixture, base: Checkpoint) -> Tensor:
    """Compute gates from the base model's states for the prompts."""
    tokenizer = _tokenizer(mixture.base)
    states: Callable[[Any], Tensor]
    if mixture.gate_mode in RUNS:
        model, plus, adapter = mixture.base.partition("+")
        loaded = load_model(adapter, base=model, dtype="bfloat16") if plus else load_model(model, dtype="bfloat16")
        average = mixture.gate_mode == "hidden_avg"

        def states(tokens: Any) -> Tensor:
            return _hidden(loaded.model, tokens, average=average)

    else:
        embeddings = base.read(EMBEDDINGS)
        n_layers = int((base.config or {})["num_hidden_layers"])

        def states(tokens: Any) -> Tensor:
            return _embedded(embeddings, tokens, n_layers)

    rows = []
    for expert in mixture.gated:
        row = states(_tokens(tokenizer, expert.positive))
        if expert.negative:
            row -= states(_tokens(tokenizer, expert.negative))
        row /= row.norm(p=2, dim=-1, keepdim=True).clamp(min=NEARLY_ZERO)
        rows.append(row)
    return torch.stack(rows, dim=0).permute(1, 0, 2)


def _tokenizer(location: str) -> Any:
    """The base's tokenizer with left padding by its first token, as in mergekit."""
    path, revision = local_files(location.partition("+")[0])
    try:
        tokenizer = extra("transformers").AutoTokenizer.from_pretrained(path, **revision)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{location}: the tokenizer of the base model, needed for the prompts, cannot be loaded: {error}. "
            "Fix: put its files next to the weights, or use gate_mode random"
        ) from error
    tokenizer.padding_side = "left"
    tokenizer.pad_token_id = tokenizer.bos_token_id
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise CheckpointError(
            f"{location}: prompts are padded with bos_token or eos_token, but the tokenizer has "
            "neither. Fix: set one in its tokenizer_config.json"
        )
    return tokenizer


def _tokens(tokenizer: Any, prompts: Sequence[str]) -> Any:
    first = tokenizer.bos_token or ""
    return tokenizer([first + p for p in prompts], return_tensors="pt", padding=True, add_special_tokens=False)


def _hidden(model: Any, tokens: Any, *, average: bool) -> Tensor:
    """States before each layer: of the last token, or averaged over all tokens; averaged over the prompts."""
    with torch.no_grad():
        found = model(**tokens, output_hidden_states=True, return_dict=True)
    states = torch.stack(found.hidden_states[:-1])  # layers x prompts x tokens x hidden size
    states = states.sum(dim=2) / states.shape[2] if average else states[:, :, -1, :]
    return states.sum(dim=1) / states.shape[1]


def _embedded(embeddings: Tensor, tokens: Any, n_layers: int) -> Tensor:
    """Sum of all token embeddings scaled to norm 1, repeated for every layer."""
    rows = embeddings[tokens["input_ids"]].float() * tokens["attention_mask"].unsqueeze(-1)
    total: Tensor = rows.sum(dim=1).sum(dim=0, keepdim=True)
    total /= total.norm(dim=-1, keepdim=True).clamp(min=NEARLY_ZERO)
    return total.repeat(n_layers, 1)
