"""A stand-in for the hub, and jobs in forks of one process."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.helpers.family import family
from tests.helpers.hub import HubStandIn, served
from tests.helpers.hub_uploads import Uploads

from actmat_app import jobs as module

__all__ = ["family"]

SECRET = "hf_secret-of-the-user"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStandIn]:
    """A stand-in that takes pushes with the token `SECRET`; this machine has a token of its own."""
    folder = tmp_path_factory.mktemp("hub")
    with served() as hub, pytest.MonkeyPatch.context() as patch:
        hub.uploads = Uploads(folder / "commits", token=SECRET, may_write={"me"})
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HUB_DISABLE_XET", "1")  # the stand-in speaks Git LFS
        patch.setenv("HF_TOKEN", "hf_of-this-machine")
        yield hub


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
from actmat_app import child, view
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
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield [sys.executable, "-S", "-P", "-c", CLIENT, place]
        process.kill()


@pytest.fixture
def forked(forks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in forks: as new processes they need most of their time to import torch."""
    monkeypatch.setattr(module, "COMMAND", forks)
