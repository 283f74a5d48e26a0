"""What is said before torch is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actmat.cli import streams


@pytest.mark.slow
def test_a_terminal_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """On a pseudo-terminal; nothing is said where stderr is a file, or with --quiet."""
    code = f"""
import os, pty, subprocess, sys
ours, theirs = pty.openpty()
done = subprocess.run([sys.executable, "-m", "actmat", "merge", *sys.argv[1:], "--out", {str(tmp_path / "out")!r}],
                      stderr=theirs, stdout=subprocess.DEVNULL, env=os.environ)
os.set_blocking(ours, False)
try:
    text = os.read(ours, 10000).decode()
except BlockingIOError:
    text = ""
print(text.splitlines()[:1])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    wrong = ["-b", str(tmp_path / "none"), "-e", str(tmp_path / "none")]
    for flags, first in ((wrong, "loading torch"), ([*wrong, "--quiet"], "actmat:")):
        done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, env=environment,
                              timeout=120, check=True)  # fmt: skip
        assert first in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-b", "x"], True),
        (["-b", "x", "--quiet"], False),
        (["-qb", "x"], False),
        (["--help"], False),
        (["-h"], False),
        (["--sequences", "-m", "x"], True),
    ],
)
def test_quiet_merges_and_help_begin_silently(
    arguments: list[str], *, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(streams, "say", lambda text, **_: messages.append(text))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.delitem(sys.modules, "torch")
    streams.starting("merge", arguments)
    assert bool(messages) is said
