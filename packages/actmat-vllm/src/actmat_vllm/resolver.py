"""vLLM's side: a `LoRAResolver` that knows mixtures. Needs vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from actmat.errors import MergeError
from actmat_vllm.mixture import Mixtures

logger = logging.getLogger("vllm.actmat")


class MixtureResolver(LoRAResolver):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Finds `math*0.7+code*0.3` by merging it."""

    def __init__(self, mixtures: Mixtures) -> None:
        self.mixtures = mixtures

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The request of an adapter or of a mixture; None, and a line in the log, where it cannot be served."""
        try:
            folder = await asyncio.to_thread(self.mixtures.find, base_model_name, lora_name)
        except (MergeError, OSError, ValueError, KeyError) as error:
            logger.error("LoRA %r is not served: %s", lora_name, error)
            return None
        if folder is None:
            return None
        # vLLM takes equal numbers for one adapter; the number is the same in every process
        number = int.from_bytes(hashlib.sha256(str(folder).encode()).digest()[:7], "big") + 1
        return LoRARequest(lora_name=lora_name, lora_int_id=number, lora_path=str(folder))


def register() -> None:
    """Entry point of vLLM's plug-ins.

    Raises:
        ValueError: the folder of adapters is not there, or the largest rank is no number.
    """
    place = os.environ.get("ACTMAT_VLLM_ADAPTERS")
    if not place:
        return
    adapters = Path(place)
    if not adapters.is_dir():
        raise ValueError(f"ACTMAT_VLLM_ADAPTERS names {place}, which is no directory.")
    text = os.environ.get("ACTMAT_VLLM_MAX_RANK", "16")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"ACTMAT_VLLM_MAX_RANK is a whole number above 0, found {text!r}.")
    cache = Path(os.environ.get("ACTMAT_VLLM_CACHE") or adapters / ".mixtures")
    LoRAResolverRegistry.register_resolver("actmat mixtures", MixtureResolver(Mixtures(adapters, cache, int(text))))
