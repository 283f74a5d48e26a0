"""Mixtures of adapters by name: parsed, checked, merged exactly, and kept by their hash. Knows nothing of vLLM."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import actmat
from actmat.errors import MergeError, RecipeError

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_PART = re.compile(rf"(?P<name>{_NAME})(?:\*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))?")
MOST_PARTS = 32
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Names of adapters with their weights, in the order given."""

    parts: tuple[tuple[str, float], ...]


def parse_mixture(text: str) -> Mixture | None:
    """`math*0.7+code*0.3` as names and weights (1 where none is given); None for any other text.

    >>> parse_mixture("math*0.7+code").parts
    (('math', 0.7), ('code', 1.0))
    >>> parse_mixture("../secret"), parse_mixture("math++code")
    (None, None)
    """
    found, position = [], 0
    while match := _PART.match(text, position):
        found.append((match["name"], float(match["weight"] or 1.0)))
        position = match.end()
        if position == len(text):
            return Mixture(tuple(found)) if len(found) <= MOST_PARTS else None
        if text[position] != "+":
            return None
        position += 1
    return None


class Mixtures:
    """Adapters of one folder, and their mixtures in another.

    Args:
        adapters: folder that holds a folder for each adapter.
        cache: folder of the mixtures.
        max_rank: largest rank that the server takes.
    """

    def __init__(self, adapters: Path, cache: Path, max_rank: int) -> None:
        self.adapters, self.cache, self.max_rank = adapters, cache, max_rank
        self._lock = threading.Lock()

    def find(self, base: str, name: str) -> Path | None:
        """Folder of the adapter or mixture of this name; None where there is none of that name.

        Raises:
            MergeError: a mixture of adapters that are there, which the server could not serve; says why.
        """
        mixture = parse_mixture(name)
        if mixture is None or any(not (self.adapters / n / CONFIG).is_file() for n, _ in mixture.parts):
            return None
        ranks = [self._rank(n, base) for n, _ in mixture.parts]
        if sum(ranks) > self.max_rank:
            listed = " + ".join(map(str, ranks))
            raise RecipeError(
                f"'{name}' has rank {listed} = {sum(ranks)}, above the largest of this server, {self.max_rank}. Fix: "
                f"--max-lora-rank {sum(ranks)} and ACTMAT_VLLM_MAX_RANK={sum(ranks)}, or merge it beforehand with "
                f"`actmat merge ... --rank {self.max_rank}`."
            )
        if len(mixture.parts) == 1 and mixture.parts[0][1] == 1.0:
            return self.adapters / mixture.parts[0][0]
        return self._merged(mixture)

    def _rank(self, name: str, base: str) -> int:
        """Rank of an adapter.

        Raises:
            RecipeError: of another base, or of a kind that vLLM does not serve.
        """
        folder = self.adapters / name
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if config.get("base_model_name_or_path") != base:
            raise RecipeError(
                f"{folder}: this server has the base {base}, and the adapter was trained on "
                f"{config.get('base_model_name_or_path')} (base_model_name_or_path)."
            )
        wrong = [f for f in ("modules_to_save", "rank_pattern", "use_dora", "trainable_token_indices") if config.get(f)]
        wrong += ["bias"] if config.get("bias", "none") != "none" else []
        if config.get("peft_type") != "LORA" or wrong:
            found = ", ".join(wrong) or f"peft_type {config.get('peft_type')}"
            raise RecipeError(f"{folder}: vLLM serves plain LoRA of one rank; found {found}.")
        return int(config["r"])

    def _merged(self, mixture: Mixture) -> Path:
        """The mixture in the folder of mixtures, merged if it is not there; appears whole or not at all."""
        out = self.cache / self._key(mixture)
        with self._lock:
            if not (out / CONFIG).is_file():
                self.cache.mkdir(parents=True, exist_ok=True)
                experts = [
                    {"path": str(self.adapters / name), "name": f"{k}-{name}", "weight": weight}
                    for k, (name, weight) in enumerate(mixture.parts)
                ]
                try:
                    actmat.merge(
                        experts=experts, method="task_arithmetic", options={"scaling": 1.0}, out=out,
                        ranks="uniform",
                    )  # fmt: skip
                except MergeError:
                    if not (out / CONFIG).is_file():  # else another process was faster
                        raise
        return out

    def _key(self, mixture: Mixture) -> str:
        """Hash of the weights and of the adapters' files."""
        digest = hashlib.sha256(actmat.__version__.encode())
        for name, weight in mixture.parts:
            digest.update(f"\0{name}\0{weight!r}\0".encode())
            for file in (CONFIG, WEIGHTS):
                with (self.adapters / name / file).open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:32]
