"""The ledger of merged bytes: this checkout equals itself, and a changed byte, file or exit code is a difference."""

from pathlib import Path

import pytest
from tests.helpers.repository import ROOT
from tests.ledger.__main__ import ask, report
from tests.ledger.answers import read_output
from tests.ledger.cases import CASES

CHOSEN = [case for case in CASES if case.name.startswith("mergekit/") or case.name == "python/layers"]


def test_a_checkout_equals_itself_and_a_changed_byte_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = ask([ROOT, ROOT], CHOSEN, tmp_path, jobs=1)
    assert report(CHOSEN, ours, theirs) == 0
    assert capsys.readouterr().out == "3 cases, no hash differs\n"
    assert all(len(answer["leaves"]) > 10 for answer in ours.values())
    folder = tmp_path / "1" / "0" / CHOSEN[0].slug
    (file,) = folder.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    changed = {**theirs, CHOSEN[0].name: {**theirs[CHOSEN[0].name], "leaves": read_output(folder)}}
    assert report(CHOSEN, ours, changed) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"hashes differ: {CHOSEN[0].name}"
    assert len(printed) == 3, "one tensor"
    assert printed[-1] == "3 cases, hashes differ in 1"


def test_missing_files_exit_codes_and_records_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    case = CHOSEN[0]
    plain = {"code": 0, "text": "", "leaves": {"out/config.json": "a", "record m: w stats.norm": 1.0}}
    fewer = {**plain, "leaves": {"record m: w stats.norm": 1.0}}
    failed = {**plain, "code": 3, "text": "a bug"}
    other = {**plain, "leaves": {**plain["leaves"], "record m: w stats.norm": 2.0}}
    for ours, theirs in ((plain, fewer), (fewer, plain), (failed, plain), (plain, failed), (failed, failed)):
        assert report([case], {case.name: ours}, {case.name: theirs}) == 1
    capsys.readouterr()
    assert report([case], {case.name: plain}, {case.name: other}) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 cases, no hash differs, records differ in 1"
