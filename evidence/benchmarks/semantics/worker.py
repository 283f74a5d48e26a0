"""Adapters as one version of PEFT makes, saves and merges them; runs in the environment of that version.

    PYTHON -m benchmarks.semantics.worker FOLDER     # a request per line of stdin, an answer per line of stdout

A request is `[family, option, name, file]`. `FOLDER/FAMILY/DTYPE` has the base, `FOLDER/NAME/adapter` the adapter and
`FOLDER/NAME/merged` what `merge_and_unload` and `save_pretrained` make of the model in memory; the answer is null, or
the error of PEFT. `merged/memory.pt` has the state dict, for tensors that `save_pretrained` leaves out, or if it
fails. With `file`, a second request for a case, the model is the base with the adapter loaded from its file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

from benchmarks.semantics.families import FAMILIES, Family
from benchmarks.semantics.options import OPTIONS, Option

SKIPPED = (".ranknum", "trainable_tokens_original")
"""Parts of names of parameters that PEFT does not save, or does not train."""


def resolved(value: Any, names: set[str]) -> Any:
    """Names of modules, of which `a|b` is that which the model has."""
    if isinstance(value, list):
        return [resolved(v, names) for v in value]
    if isinstance(value, dict):
        return {resolved(k, names) if isinstance(v, list) else k: v for k, v in value.items()}
    if isinstance(value, str) and "|" in value and "(" not in value:
        kinds = value.split(".weight")
        found = next((p for p in kinds[0].split("|") if any(n.endswith(p) for n in names)), value)
        return ".weight".join([found, *kinds[1:]])
    return value


def adapted(base: Any, family: Family, option: Option, folder: Path) -> Any:
    """The model with an adapter in which all that is trained has random numbers; saves the adapter."""
    import peft
    import torch

    torch.manual_seed(zlib.crc32(folder.name.encode()))
    model = copy.deepcopy(base)
    names = {n for n, _ in model.named_modules()}
    fields = option.fields(family) or {}
    named = ("target_modules", "modules_to_save", "trainable_token_indices", "feedforward_modules", "layers_pattern")
    fields |= {k: resolved(fields[k], names) for k in (*named, "target_parameters") if k in fields}
    config = getattr(peft, option.config)(**fields)
    tokens = torch.randint(1, 30, (4, 8))
    if "corda" in option.start:
        from peft.tuners.lora.corda import preprocess_corda

        config.corda_config = peft.tuners.lora.config.CordaConfig()
        preprocess_corda(model, config, run_model=lambda: model(input_ids=tokens[:1]))
    made = peft.get_peft_model(model, config)
    if option.start == "eva":
        peft.initialize_lora_eva_weights(made, [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}])
    more = {}
    if "convert" in option.start:
        made.peft_config["default"].init_lora_weights = True  # as PEFT's documentation saves the beginning
        made.save_pretrained(folder / "start")
        made.peft_config["default"].init_lora_weights = fields["init_lora_weights"]
        more["path_initial_model_for_weight_conversion"] = str(folder / "start")
    rng = torch.Generator().manual_seed(zlib.crc32(folder.name.encode()) + 1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and not any(s in name for s in SKIPPED):
                noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
                parameter.add_((option.scale * noise).to(parameter.dtype))
    made.save_pretrained(folder / "adapter", **more)
    return made


class Worker:
    """The models of families that were built so far, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._models = folder, dict[tuple[str, str], Any]()

    def answer(self, family: str, option: str, name: str, file: bool = False) -> str | None:
        """Make one case; the error of PEFT in a line, or None."""
        import peft
        import torch

        folder, key = self.folder / name, (family, OPTIONS[option].dtype)
        if key not in self._models:
            self._models[key] = FAMILIES[family].build(key[1])
            self._models[key].save_pretrained(self.folder / family / key[1])
        made = None
        try:
            if file:
                made = peft.PeftModel.from_pretrained(copy.deepcopy(self._models[key]), folder / "adapter")
                shutil.rmtree(folder / "merged")
            else:
                made = adapted(self._models[key], FAMILIES[family], OPTIONS[option], folder)
            merged = made.merge_and_unload()
            (folder / "merged").mkdir()
            torch.save({k: v.detach().clone() for k, v in merged.state_dict().items()}, folder / "merged" / "memory.pt")
            with contextlib.suppress(RuntimeError):  # it does not save layers that share their weights
                merged.save_pretrained(folder / "merged")
        except Exception as error:  # noqa: BLE001 - whatever PEFT says is the answer
            step = "made" if made is None else "merged"
            text = " ".join(str(error).split()) or "no message"
            return f"not {step}: {type(error).__name__}: {text[:300]}"
        return None


def main() -> None:
    """Answer until stdin ends; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    worker = Worker(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(worker.answer(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
