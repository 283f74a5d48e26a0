"""Mixtures of LoRA adapters in vLLM."""

from __future__ import annotations

from actmat_vllm.mixture import Mixture, Mixtures, parse_mixture

__all__ = ["Mixture", "Mixtures", "parse_mixture"]
