"""No rule depends on the order of a set: two interpreters with other hash seeds give the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib
import torch
from tests.helpers.experts import Experts, merged
from actmat.methods import all_methods
torch.set_num_threads(1)
experts = Experts.random(3, (12, 10), dtype=torch.float32)
for method in all_methods():
    value = merged(method, experts)
    print(method.name, hashlib.sha256(bytes(value.contiguous().untyped_storage())).hexdigest())
"""


@pytest.mark.slow
def test_hash_seed_does_not_change_the_bytes() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "12345")
    ]
    first, second = (run.communicate()[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert first == second
    assert len(first.splitlines()) > 1
