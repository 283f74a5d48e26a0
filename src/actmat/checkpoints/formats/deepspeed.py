"""Checkpoints of DeepSpeed: recognised and refused with the command that converts them.

With ZeRO the parameters are flat pieces of one long vector per rank, in pickles of DeepSpeed's and the trainer's own
objects: only its own script puts them together.
"""

from __future__ import annotations

import re
from typing import NoReturn

from actmat.checkpoints.source import Format, Source
from actmat.errors import CheckpointError

__all__ = ["DEEPSPEED"]

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
    folder = place if SCRIPT in source.names else f"the folder with {SCRIPT}, above it"
    raise CheckpointError(
        f"{source.location}: expected weights, found a checkpoint of DeepSpeed, whose ranks hold flat pieces of all "
        f"parameters in pickles of its own. Fix: convert it where DeepSpeed is installed, in {folder}: python "
        f"{SCRIPT} . OUT --safe_serialization, then give OUT."
    )


DEEPSPEED = Format("deepspeed", (), claims=_claims, open=_refuse)
