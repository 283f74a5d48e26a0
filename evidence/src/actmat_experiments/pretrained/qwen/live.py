"""A base in memory whose linear layers take deltas for a while: tests, and the inputs of its layers.

Shapes: `N` tokens, `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from actmat_experiments.pretrained.decoder import Coded

_PREFIX, _A = "base_model.model.", ".lora_A.weight"
Deltas = Iterable[tuple[str, Tensor]]
"""Name of a linear layer, and its delta, `O I`."""


class Factors(NamedTuple):
    """`delta = b_OR @ a_RI`."""

    b_OR: Tensor
    a_RI: Tensor

    def dense(self) -> Tensor:
        """`O I`."""
        return self.b_OR @ self.a_RI


def read_factors(folder: Path, device: str = "cpu") -> dict[str, Factors]:
    """Name of a linear layer -> factors of a LoRA adapter in PEFT's layout, in float32, with the scale in `b_OR`."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert not config.get("alpha_pattern"), "experts and merges of a suite have one alpha"
    tensors = load_file(folder / "adapter_model.safetensors", device=device)
    factors = {}
    for key in (key for key in tensors if key.endswith(_A)):
        a_RI, b_OR = tensors[key].float(), tensors[key.replace(".lora_A.", ".lora_B.")].float()
        scale = config["lora_alpha"] / (len(a_RI) ** 0.5 if config.get("use_rslora") else len(a_RI))
        factors[key.removeprefix(_PREFIX).removesuffix(_A)] = Factors(b_OR * scale, a_RI)
    return factors


def dense(factors: Mapping[str, Factors]) -> Deltas:
    """Deltas of an adapter, one at a time."""
    return ((name, pair.dense()) for name, pair in factors.items())


class Live:
    """A base whose linear layers, all but the head, take deltas.

    Args:
        model: of transformers; moved to the device.
    """

    def __init__(self, model: Any, device: str) -> None:
        self.model, self.device = model.to(device), device
        head = model.get_output_embeddings()
        linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
        self._weights: dict[str, Tensor] = {name: module.weight for name, module in linear.items()}
        self._start = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @contextlib.contextmanager
    def changed(self, deltas: Deltas) -> Iterator[Any]:
        """The model with these deltas, to the end of the block."""
        touched = []
        try:
            with torch.no_grad():
                for name, delta_OI in deltas:
                    touched.append(name)
                    self._weights[name].copy_(self._start[name] + delta_OI)
            yield self.model
        finally:
            with torch.no_grad():
                for name in touched:
                    self._weights[name].copy_(self._start[name])

    @torch.no_grad()
    def layer_inputs(self, prompts: Sequence[Coded]) -> dict[str, Tensor]:
        """Name of a linear layer -> its inputs over all tokens of the prompts, `N I`; layers that read one tensor
        share it.
        """
        parts: dict[str, list[Tensor]] = {}
        first_reader: dict[str, str] = {}
        for coded in prompts:
            seen = self._observe(torch.tensor([coded.prompt], device=self.device))
            readers: dict[int, str] = {}
            for name, rows_NI in seen.items():
                first_reader[name] = readers.setdefault(rows_NI.data_ptr(), name)
                if first_reader[name] == name:
                    parts.setdefault(name, []).append(rows_NI.reshape(-1, rows_NI.shape[-1]))
        rows = {name: torch.cat(some) for name, some in parts.items()}
        return {name: rows[reader] for name, reader in first_reader.items()}

    def _observe(self, ids_NL: Tensor) -> dict[str, Tensor]:
        """Input of every linear layer in one pass."""
        seen: dict[str, Tensor] = {}
        layers = [(name, self.model.get_submodule(name)) for name in self._weights]
        handles = [
            layer.register_forward_pre_hook(lambda _, given, name=name: seen.__setitem__(name, given[0].detach()))
            for name, layer in layers
        ]
        self.model.get_decoder()(input_ids=ids_NL, use_cache=False)
        for handle in handles:
            handle.remove()
        return seen
