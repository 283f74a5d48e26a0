"""The fuzzer keeps its promises, and a few hundred cases of every door."""

from collections.abc import Callable
from pathlib import Path

import fuzz.doors  # noqa: F401 - registers the doors
import pytest
import torch
from fuzz.harness import DOORS, Door, kept_cases
from fuzz.worker import run_batch, run_files

from actmat.errors import CheckpointError
from fuzz import __main__ as command
from fuzz import harness

# The fuzzer sees every sort of broken promise.


class RawError(CheckpointError):
    """An error that shows foreign text as it is."""

    def __str__(self) -> str:
        return self.headline


def _refuse(text: str) -> str:
    raise RawError(text)


def _hidden(allocate: Callable[[], object]) -> str:
    try:
        allocate()
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError("the file is damaged") from error
    return ""


def _spin() -> str:
    while True:
        sum(range(1000))


def _exit() -> str:
    import os

    os._exit(3)


def _crash() -> str:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


READS: dict[str, Callable[[], str | None]] = {
    "fine": lambda: "two\nlines",
    "refused": lambda: _refuse("two\nlines"),
    "escape": lambda: _refuse("\x1b[2J"),
    "shown": lambda: "a\rb",
    "reversed": lambda: _refuse("\u202e"),
    "c1": lambda: "\x9b",
    "surrogate": lambda: "\udcff",
    "python": lambda: str(len(bytearray(400_000_000))),
    "native": lambda: str(torch.ones(100_000_000).shape),
    "untouched": lambda: str(torch.empty(100_000_000).shape),
    "giant": lambda: _hidden(lambda: torch.empty(10**12)),
    "giant list": lambda: _hidden(lambda: [0] * 10**12),
    "foreign": lambda: str({}["x"]),
    "slow": lambda: str(sum(range(15_000_000))),
    "endless": _spin,
    "exit": _exit,
    "crash": _crash,
}
WHY = {
    **dict.fromkeys(("escape", "shown", "reversed", "c1", "surrogate"), "control character"),
    **dict.fromkeys(("python", "native", "untouched"), "bytes, at most"),
    **dict.fromkeys(("giant", "giant list"), "an allocation that failed"),
    "foreign": "KeyError",
    "slow": "s, at most",
    "endless": "SIGPROF",
    "exit": "exit code 3",
    "crash": "SIGSEGV",
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Door:
    """A door whose case says what its reader does, with short limits and a folder of its own for cases."""
    monkeypatch.setattr("fuzz.worker.KILLED_AFTER", 1.0)
    monkeypatch.setattr(harness, "SEEDS", tmp_path / "seeds")
    made = Door("toy", lambda rng: {"what": rng.choice(("fine", "refused")).encode()},
                lambda files: READS[files["what"].decode()]())  # fmt: skip
    monkeypatch.setitem(DOORS, "toy", made)
    return made


@pytest.mark.parametrize("what", sorted(READS))
def test_broken_promises_are_seen(what: str, toy: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MAX_SECONDS", 0.1 if what == "slow" else 10.0)
    batch = run_files("toy", [{"what": b"fine"}, {"what": what.encode()}])
    if what not in WHY:
        assert batch.cases == 2
        assert not batch.failures
    else:
        ((number, _, said),) = batch.failures
        assert number == 1
        assert WHY[what] in said


def test_failures_are_reported_with_the_command_that_repeats_them(
    toy: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DOORS, "toy", Door("toy", lambda rng: {"what": b"foreign"}, toy.read))
    monkeypatch.setattr("sys.argv", ["python -m fuzz", "--door", "toy", "--seed", "5", "--minutes", "0.1"])
    assert command.main() == 1
    said = capsys.readouterr().out
    assert "--door 'toy' --seed 5 --case 0: KeyError" in said
    assert [files for _, files in kept_cases("toy")] == [{"what": b"foreign"}]
    monkeypatch.setattr("sys.argv", ["python -m fuzz", "--door", "toy", "--seed", "5", "--case", "0"])
    assert command.main() == 1


# A few hundred random cases per door, and all that once broke a promise; `make fuzz` runs more.


CASES = 200


@pytest.mark.fuzz
@pytest.mark.parametrize("name", sorted(DOORS))
def test_a_door_lets_nothing_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.harness.MAX_SECONDS", 10.0)  # a busy machine is no defect
    kept = list(kept_cases(name))
    again = run_files(name, [files for _, files in kept])
    assert not again.failures, [f"{kept[k][0]}: {said}" for k, _, said in again.failures]
    found = run_batch(name, seed=1, first=0, count=CASES)
    assert not found.failures, found.failures[0]
    assert found.cases == CASES
