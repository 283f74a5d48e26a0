"""Checkpoints of DeepSpeed: recognised and refused with the command that converts them.

With ZeRO the parameters are flat pieces of one long vector per rank, in pickles of DeepSpeed's and the trainer's own
objects: only its own script puts them together. It is for all stages of ZeRO, and not for pipelines.
Source: DeepSpeed, `utils/zero_to_fp32.py`.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import NoReturn

from actmat.checkpoints.source import Format, Source
from actmat.errors import CheckpointError

STATES = re.compile(
    r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+.*_(model|optim)_states\.pt|layer_\d+-model_.*states\.pt"
)
STEP = re.compile(r"global_step\d+")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".bin.index.json")
SCRIPT = "zero_to_fp32.py"


def _claims(source: Source) -> bool:
    """True for a folder of DeepSpeed's states, or of its steps, without weights of another format."""
    weights = [n for n in source.weights if n.endswith(OTHER_WEIGHTS)]
    if any(STATES.fullmatch(n) for n in weights):
        return True
    return not weights and any(STEP.fullmatch(n) for n in source.names) and bool({"latest", SCRIPT} & {*source.names})


def _refuse(source: Source) -> NoReturn:
    place = source.location.rstrip("/")
    names = [n for n in source.names if STATES.fullmatch(n)]
    step = PurePath(place).name if STEP.fullmatch(PurePath(place).name) else ""
    if any(n.startswith("layer_") for n in names):
        found = "of a pipeline of DeepSpeed, whose files hold the layers of one stage each, in pickles of its own"
        fix = (
            "convert it with the tools of the program that trained it (Megatron-DeepSpeed: python "
            "tools/convert_checkpoint/deepspeed_to_transformers.py --input_folder DIR --output_folder OUT)"
        )
    elif names and not any("optim_states" in n for n in names):
        found = "of DeepSpeed without the states of ZeRO's optimiser, in pickles of its own"
        fix = (
            "save its model alone where DeepSpeed is installed and you trust the file: python -c "
            f"\"import torch; torch.save(torch.load('{names[0]}', weights_only=False)['module'], "
            "'pytorch_model.bin')\", then give that "
            "file. It has no weights with ZeRO-3: there the optim_states of all ranks are needed, too"
        )
    else:
        folder = place if SCRIPT in source.names else f"the folder with {SCRIPT}, above it"
        found = "of DeepSpeed, whose ranks hold flat pieces of all parameters in pickles of its own"
        tag = f" --tag {step}" if step else ""
        fix = (
            f"convert it where DeepSpeed is installed, in {folder}: python {SCRIPT} . OUT --safe_serialization{tag}, "
            "then give OUT"
        )
    raise CheckpointError(f"{source.location}: expected weights, found a checkpoint {found}. Fix: {fix}.")


DEEPSPEED = Format("deepspeed", (), claims=_claims, open=_refuse)
