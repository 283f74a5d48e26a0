"""Doors of distributed checkpoints: the pickled metadata, and the items of a file."""

from __future__ import annotations

import random
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from fuzz.doors.folder import in_folder, read_all
from fuzz.draw import mutated_bytes, pickled
from fuzz.harness import Files, door

PICKLED = (
    b"cbuiltins\neval\n", b"cos\nsystem\n", b"ctorch\nSize\n", b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"\x8c\x01a", b"K\x01", b"(" * 50, b"}" * 50, b"\x85" * 50, b"\x94" * 20, b"r\xff\xff\xff\x7f", b"\x8a\xff" + b"\x7f" * 255,
)  # fmt: skip


@cache
def saved() -> tuple[bytes, bytes]:
    """Metadata and file of a small checkpoint."""
    state = {"model": {"a.weight": torch.ones(2, 3), "b": torch.zeros(4).bfloat16()}, "optim": {"m": torch.ones(2)}}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=place, no_dist=True)
        return (Path(place) / ".metadata").read_bytes(), (Path(place) / "__0_0.distcp").read_bytes()


def _files(rng: random.Random) -> Files:
    metadata, data = saved()
    kind = rng.random()
    if kind < 0.6:
        metadata = mutated_bytes(rng, metadata)
    elif kind < 0.8:
        data = mutated_bytes(rng, data)
    else:
        metadata = b"\x80\x04" + pickled(rng, PICKLED)
    return {".metadata": metadata, "__0_0.distcp": data}


door("distributed checkpoints", _files, in_folder(read_all))
