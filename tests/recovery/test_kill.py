"""A merge that is killed at any moment leaves nothing that looks finished, and the same command finishes it."""

import contextlib
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.merge_server import Server
from tests.helpers.merging import Family, actmat, contents, hidden

from actmat.checkpoints.writing.listed import MANIFEST_NAME

KILLS = 20
EVERY_TIME = 3
"""Kills of every test run; the others are slow ones."""
LAYERS = 28


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Enough tensors that the work takes a while, and shards, whose index is written last."""
    return Family.make(tmp_path_factory.mktemp("family"), layers=LAYERS)


@pytest.fixture
def place(family: Family, request: pytest.FixtureRequest) -> Path:
    """As deep as the reference, because a manifest tells where the inputs lie as seen from the output."""
    folder = family.root / re.sub(r"\W", "-", request.node.name)
    folder.mkdir()
    return folder


class Reference:
    """What an uninterrupted run gives, and how long it takes."""

    def __init__(self, server: Server, family: Family) -> None:
        self.seconds = 1e9
        for turn in range(2):  # the second knows the files
            out = family.root / f"reference{turn}" / "out"
            began = time.monotonic()
            status, errors = server.start(command(family, out)).wait()
            assert status == 0, errors
            self.seconds = min(self.seconds, time.monotonic() - began)
        self.files = contents(family.root / "reference0" / "out")


@pytest.fixture(scope="module")
def reference(server: Server, family: Family) -> Reference:
    return Reference(server, family)


def command(family: Family, out: Path, *flags: str) -> list[str]:
    return family.argv("--out", str(out), "--set", "max_shard_size=40kB", *flags)


def is_complete(out: Path, reference: Reference) -> bool:
    return out.exists() and contents(out) == reference.files


@pytest.mark.parametrize(
    "number", [n if n < EVERY_TIME else pytest.param(n, marks=pytest.mark.slow) for n in range(KILLS)]
)
def test_kill_minus_nine_at_a_random_moment(
    server: Server, family: Family, reference: Reference, place: Path, number: int
) -> None:
    moment = random.Random(number).random() * reference.seconds
    out = place / "out"
    run = server.start(command(family, out))
    while time.monotonic() - run.began < moment:
        assert not out.exists() or (out / MANIFEST_NAME).is_file(), "it appears whole or not at all"
        time.sleep(0.001)
    run.signal(signal.SIGKILL)
    status, errors = run.wait()
    assert status in (0, -signal.SIGKILL), errors
    assert is_complete(out, reference) or (status != 0 and not out.exists())
    if status != 0:  # it goes on, or clears what a run leaves that is killed between the rename and its end
        status, errors = server.start(command(family, out)).wait()
        assert status == 0, errors
        assert is_complete(out, reference)
    assert hidden(place) in ([], [".out.actmat-lock"])


def test_kills_in_a_row_make_progress(server: Server, family: Family, reference: Reference, place: Path) -> None:
    out = place / "out"
    for _ in range(3):
        assert server.start(command(family, out), at=(10, signal.SIGKILL)).wait()[0] == -signal.SIGKILL
    status, errors = server.start(loud(command(family, out))).wait()
    assert status == 0, errors
    assert "interrupted merge: 30 tensors are done" in errors
    assert is_complete(out, reference)


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 130, "actmat: interrupted; "),
        (signal.SIGTERM, 143, "actmat: stopped by SIGTERM; "),
        (signal.SIGHUP, 129, "actmat: stopped by SIGHUP; "),
    ],
)
def test_an_interruption_is_told_and_can_be_resumed(
    server: Server, family: Family, reference: Reference, place: Path, number: signal.Signals, code: int, says: str
) -> None:
    out = place / "out"
    status, errors = server.start(command(family, out), at=(3, number)).wait()
    assert status == code, errors
    said = re.search(says + r"(\d+) of (\d+) tensors are kept; the same command goes on where it stopped", errors)
    assert said is not None, errors
    assert "Traceback" not in errors
    assert not out.exists()
    assert hidden(place) == [".out.actmat-partial"]
    status, errors = server.start(loud(command(family, out))).wait()
    assert status == 0, errors
    assert f"Continuing an interrupted merge: {said[1]} tensors are done" in errors
    assert is_complete(out, reference)
    assert hidden(place) == []


def loud(argv: list[str]) -> list[str]:
    return [a for a in argv if a != "--quiet"]


def wait_until_stopped(pid: int) -> None:
    """All threads of the process have stopped, or it has ended."""
    for _ in range(12_000):
        with contextlib.suppress(FileNotFoundError):  # a thread that ended between the two calls
            stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
            if all(s.rpartition(")")[2].split()[0] in "TZX" for s in stats):
                return
        time.sleep(0.005)
    raise AssertionError("the process goes on after SIGSTOP")


def test_a_second_process_is_refused_and_the_first_unharmed(
    server: Server, family: Family, reference: Reference, place: Path
) -> None:
    out = place / "out"
    first = server.start(command(family, out), at=(3, signal.SIGSTOP))
    wait_until_stopped(first.pid)
    before = sorted((p.name, p.read_bytes()) for p in (place / ".out.actmat-partial").iterdir())
    second = actmat(command(family, out), code=1)
    assert "Another actmat is writing" in second.err
    assert sorted((p.name, p.read_bytes()) for p in (place / ".out.actmat-partial").iterdir()) == before
    assert not out.exists()
    first.signal(signal.SIGCONT)
    status, errors = first.wait()
    assert status == 0, errors
    assert is_complete(out, reference)
    assert hidden(place) == []
