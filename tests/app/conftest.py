"""Adapters in a stand-in for the hub, and visitors' jobs that are pointed at it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import checkpoint_files
from tests.helpers.family import family
from tests.helpers.hub import HubStandIn, served
from tests.helpers.hub_uploads import Uploads

from actmat_app import jobs as module
from actmat_app.jobs import Jobs
from actmat_app.limits import Limits

__all__ = ["family"]

HOSTILE = "<img src=x onerror=alert(1)>"
SECRET = "hf_secret-of-the-visitor"


def save_lora(folder: Path, seed: int, module: str = "model.layers.0.self_attn.q_proj", **config: Any) -> torch.Tensor:
    """An adapter of rank 4 of one 16x16 module; its delta."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn((4, 16), generator=rng), torch.randn((16, 4), generator=rng)
    fields = {"target_modules": ["q_proj"], "bias": "none", "base_model_name_or_path": "org/base"}
    checkpoint_files.save_lora(folder, {module: (a, b)}, **fields | {"task_type": "CAUSAL_LM"} | config)
    return 2.0 * (b.double() @ a.double())


World = tuple[HubStandIn, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A stand-in with repositories, and the deltas of `org/math` and `org/code`; the server has a token of its own."""
    folder = tmp_path_factory.mktemp("hub")
    with served() as hub, pytest.MonkeyPatch.context() as patch:
        hub.uploads = Uploads(folder / "commits", token=SECRET, may_write={"me"})
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HUB_DISABLE_XET", "1")  # the stand-in speaks Git LFS
        patch.setenv("HF_TOKEN", "hf_of-the-server")
        made = folder / "repositories"
        deltas = {f"org/{name}": save_lora(made / name, seed) for seed, name in enumerate(("math", "code"))}
        save_lora(made / "other", 3, base_model_name_or_path=f"org/{HOSTILE}")
        save_lora(made / "hostile", 4, module=f"{HOSTILE}.q_proj")
        save_lora(made / "pickled", 6)
        save_lora(made / "long", 7)
        (made / "long" / "vocab.txt").write_text("word\n" * 20_000)
        torch.save({"w": torch.ones(2, 2)}, made / "pickled" / "adapter_model.bin")
        (made / "pickled" / "adapter_model.safetensors").unlink()
        for path in made.iterdir():
            (path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
            hub.add(f"org/{path.name}", path)
        yield hub, deltas


CLIENT = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
socket.send_fds(server, [json.dumps([os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
sys.exit(int(server.recv(4)))
"""
SERVER = """
import json, os, socket, sys, tempfile
import torch, actmat.api.merging, actmat.cli.main, actmat.diagnostics, actmat.extras.pages.html, actmat.run.recipes
from actmat_app import child, limits, view
assert "huggingface_hub" not in sys.modules, "it reads the environment when it is imported"
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
while True:
    client, _ = server.accept()
    said, streams, *_ = socket.recv_fds(client, 1 << 20, 3)
    process = os.fork()
    if process == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        folder, environment = json.loads(said)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        child.main()
        sys.stderr.flush()
        os._exit(0)
    for stream in streams:
        os.close(stream)
    client.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
    client.close()
"""


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A command that runs a job as `COMMAND` does, in a fork of a process that has loaded torch."""
    place = str(tmp_path_factory.mktemp("forks") / "socket")
    with subprocess.Popen([sys.executable, "-P", "-c", SERVER, place], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield [sys.executable, "-S", "-P", "-c", CLIENT, place]
        process.kill()


@pytest.fixture
def forked(forks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in forks: as new processes they need most of their time to import torch."""
    monkeypatch.setattr(module, "COMMAND", forks)


@pytest.fixture
def visitors(world: World, forked: None) -> Iterator[Jobs]:
    jobs = Jobs(Limits(seconds=300))
    yield jobs
    jobs.close()
