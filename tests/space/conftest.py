"""Adapters in a stand-in for the hub, and jobs that are pointed at it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.hub import HubStandIn, served
from tests.helpers.hub_uploads import Uploads

from actmat_space.jobs import Jobs
from actmat_space.limits import Limits

HOSTILE = "<img src=x onerror=alert(1)>"
SECRET = "hf_secret-of-the-visitor"


def save_lora(folder: Path, seed: int, module: str = "model.layers.0.self_attn.q_proj", **config: Any) -> torch.Tensor:
    """An adapter of rank 4 of one 16x16 module; its delta."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn((4, 16), generator=rng), torch.randn((16, 4), generator=rng)
    folder.mkdir(parents=True)
    start = f"base_model.model.{module}"
    save_file({f"{start}.lora_A.weight": a, f"{start}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
              "base_model_name_or_path": "org/base", "task_type": "CAUSAL_LM"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return 2.0 * (b.double() @ a.double())


def publish(hub: HubStandIn, folder: Path) -> dict[str, torch.Tensor]:
    """Repositories of every sort; the deltas of `org/math` and `org/code`."""
    deltas = {f"org/{name}": save_lora(folder / name, seed) for seed, name in enumerate(("math", "code"))}
    save_lora(folder / "other", 3, base_model_name_or_path=f"org/{HOSTILE}")
    for name in ("hostile1", "hostile2"):
        save_lora(folder / name, 4, module=f"{HOSTILE}.q_proj", **{f"<b>{name}": "${7*7}{{7*7}}"})
    save_lora(folder / "dora", 5, use_dora=True)
    save_lora(folder / "pickled", 6)
    (folder / "pickled" / "adapter_model.safetensors").rename(folder / "pickled" / "adapter_model.bin")
    (folder / "full").mkdir()
    save_file({"w": torch.ones(2, 2)}, folder / "full" / "model.safetensors")
    (folder / "full" / "config.json").write_text("{}")
    for name in sorted(p.name for p in folder.iterdir()):
        (folder / name / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
        (folder / name / "optimizer.pt").write_bytes(b"0" * 1000)
        hub.add(f"org/{name}", folder / name)
    return deltas


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubStandIn, dict[str, torch.Tensor]]]:
    """A stand-in with repositories for processes of their own, whose own token is not the visitor's."""
    folder = tmp_path_factory.mktemp("hub")
    with served() as hub, pytest.MonkeyPatch.context() as patch:
        hub.uploads = Uploads(folder / "commits", token=SECRET, may_write={"me"})
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HUB_DISABLE_XET", "1")  # the stand-in speaks Git LFS
        patch.setenv("HF_TOKEN", "hf_of-the-space")
        yield hub, publish(hub, folder / "repositories")


@pytest.fixture(scope="module")
def jobs(world: object, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(Limits(seconds=300), tmp_path_factory.mktemp("space"))
