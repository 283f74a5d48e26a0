"""No command ends in a traceback: an unforeseen error becomes a message, too little memory an error of ours."""

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tests.helpers.merging import CONFIG, Family, contents, save_checkpoint
from tests.helpers.merging import actmat as run

import actmat.report.verify  # noqa: F401 - to be replaced in sys.modules, where its function does not hide it
from actmat.engine import session
from actmat.errors import MergeError, memory_errors
from actmat.version import __version__


def raising(error: BaseException) -> object:
    """A function that raises `error`."""

    def function(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return function


def test_an_unforeseen_error_says_where_and_how_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forged = raising(ZeroDivisionError("a forged\n\x1b[2Jline"))
    monkeypatch.setattr("actmat.api.verifying.verify", forged)
    done = run(["verify", "somewhere"])
    assert (done.code, done.out) == (3, "")
    assert "this is a bug: ZeroDivisionError: a forged" in done.err
    assert re.search(rf"verify\.py:\d+; actmat {re.escape(__version__)}\)", done.err)
    assert "'actmat inspect' of the base" in done.err
    assert "Traceback" not in done.err
    assert "\x1b" not in done.err


MEMORY = {
    "python": MemoryError(),
    "torch": RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: "
                          "you tried to allocate 16000000 bytes. Error code 12 (Cannot allocate memory)"),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "thread": RuntimeError("can't start new thread"),
    "map": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "library": ImportError("libx.so: failed to map segment from shared object"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MEMORY)
def test_too_little_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.make(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(session.Session, "merge", raising(MEMORY[kind]))
        done = run(family.argv(), code=3)
    assert "Too little memory" in done.err
    assert "--max-memory" in done.err
    assert "--threads 1" in done.err
    assert "bug" not in done.err


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), OSError(errno.EIO, "Input/output error")])
def test_other_errors_are_not_about_memory(error: Exception) -> None:
    with pytest.raises(type(error)) as found, memory_errors():
        raise error
    assert not isinstance(found.value, MergeError)


LIMITED = """
import resource, sys
import torch, actmat, actmat.run, actmat.cli.screen, actmat.cli.main
from actmat.methods import all_methods
status = open("/proc/self/status").read()
size = int(status.split("VmSize:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]),) * 2)
sys.argv = ["actmat", *sys.argv[2:]]
actmat.cli.main.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the size of the process from /proc")
def test_a_limit_on_the_address_space(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(1500, 1500) for i in range(2)}
    base = save_checkpoint(tmp_path / "base", tensors, CONFIG)
    expert = save_checkpoint(tmp_path / "e", {n: t + 0.01 * torch.randn_like(t) for n, t in tensors.items()}, CONFIG)
    flags = ["-b", str(base), "-e", f"a={expert}", "-e", f"b={expert}", "--threads", "1", "-q"]
    argv = ["merge", *flags, "--out", str(tmp_path / "out")]
    limited = [sys.executable, "-c", LIMITED, str(30 << 20), *argv]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done
    assert "Too little memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    run(argv, code=0)
    run(["merge", *flags, "--out", tmp_path / "again"], code=0)
    one, two = contents(tmp_path / "out"), contents(tmp_path / "again")
    assert one["model.safetensors"] == two["model.safetensors"]
