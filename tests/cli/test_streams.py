"""A stdout or stderr that is closed, full, or not read any more: merges are complete, and exit codes say so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.merging import Family, actmat, contents
from tests.helpers.repository import ROOT


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.make(tmp_path_factory.mktemp("family"), layers=1)


def shell(family: Family, line: str) -> tuple[list[int], str]:
    """Run a pipeline in bash; exit codes of its parts, and stderr."""
    actmat = f"{sys.executable} -m actmat"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "80"}
    script = line.replace("MERGE", f"{actmat} merge -b base -e expert0 -e expert1").replace("ACTMAT", actmat)
    script += '; printf "%s " "${PIPESTATUS[@]}" > codes.txt'
    done = subprocess.run(["bash", "-c", script], cwd=family.root, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return [int(c) for c in (family.root / "codes.txt").read_text().split()], done.stderr


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("full", "MERGE --out full > /dev/full", "the summary cannot be printed: No space left on device"),
        pytest.param("pipe", "MERGE --out pipe | true", "the summary cannot be printed: Broken pipe", marks=SLOW),
        pytest.param("none", "MERGE --out none <&- >&- 2>&-", "", marks=SLOW),
        ("stderr", "MERGE --out stderr > /dev/null 2> /dev/full", ""),
    ],
)
def test_a_merge_is_complete_and_its_exit_code_says_so(
    family: Family, monkeypatch: pytest.MonkeyPatch, name: str, line: str, says: str
) -> None:
    codes, errors = shell(family, line)
    assert codes[0] == 0, errors
    assert says in errors
    if not (family.root / "reference").exists():
        monkeypatch.chdir(family.root)
        experts = ["-e", "expert0", "-e", "expert1"]
        actmat(["merge", "-b", "base", *experts, "--out", "reference", "--quiet"], code=0)
    assert contents(family.root / name) == contents(family.root / "reference")


@pytest.mark.parametrize("what", ["methods", pytest.param("plan -b base -e expert0 --json", marks=SLOW), "--help"])
def test_other_commands_fail_where_nobody_gets_their_result(family: Family, what: str) -> None:
    codes, errors = shell(family, f"ACTMAT {what} > /dev/full")
    assert codes == [1], errors
    assert errors == "actmat: the result cannot be printed: No space left on device (stdout).\n"
    codes, errors = shell(family, f"ACTMAT {what} | true")
    assert codes == [141, 0], errors
    assert errors == ""


def test_without_a_buffer_too(family: Family) -> None:
    codes, errors = shell(family, "PYTHONUNBUFFERED=1 ACTMAT methods > /dev/full")
    assert codes == [1]
    assert errors == "actmat: the result cannot be printed: No space left on device (stdout).\n"


def test_an_error_keeps_its_exit_code_where_stderr_is_full(family: Family) -> None:
    assert shell(family, "MERGE --out x --method nope 2> /dev/full")[0] == [1]
    assert not Path(family.root / "x").exists()
