"""The harness that disturbs merges at random: a few runs, and it sees a writer that breaks its promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.__main__ import main
from tests.helpers.forks import in_fork
from tests.helpers.repository import ROOT


def chaos(*flags: str, folder: Path, startup: str = "") -> subprocess.CompletedProcess[str]:
    """Run the harness, which forks, in a fork of this process; `startup`: code that runs in it and in its servers."""
    (folder / "sitecustomize.py").write_text(startup)

    def work() -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT / 'src'}:{ROOT}"}
        exec(startup, {})
        sys.argv = ["chaos", *flags]
        sys.exit(main())

    return in_fork(work)


def test_a_few_runs(tmp_path: Path) -> None:
    sorts = ("sharded", "variants", "adapter", "overwrite", "model, devices", "extraction", "tune")
    done = chaos("--runs", "8", *(flag for sort in sorts for flag in ("--sort", sort)), folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "8 runs, 0 problems" in done.stdout


STRAY = """
from actmat.checkpoints.writing.staging import Staging

read = Staging._read_journal

def leaving_a_file(stage):
    found = read(stage)
    if found:
        (stage.path / "stray").write_text("")
    return found

Staging._read_journal = leaving_a_file
"""


@pytest.mark.slow
def test_a_resumption_that_gives_another_output_is_found(tmp_path: Path) -> None:
    done = chaos("--runs", "7", "--sort", "model", startup=STRAY, folder=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "other bytes in the end" in done.stdout
