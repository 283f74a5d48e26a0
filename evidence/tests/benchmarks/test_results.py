"""Result files are well-formed: each has its provenance, its lines can be read, and its scores can be traced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from benchmarks import common, provenance
from benchmarks.evidence.group import FOLDER, MORE, SUITES
from benchmarks.mergekit.tables import GOOD, OUTCOMES
from benchmarks.provenance import EVIDENCE

from actmat_experiments.harness.results import REFERENCES, read_scores

FILES = sorted(p for p in common.RESULTS.rglob("*.json*") if p.name != provenance.LEDGER)
MEND = "run python -m benchmarks.provenance FILE --command '...' on the machine that measured"


def named(path: Path) -> str:
    return str(path.relative_to(common.RESULTS))


def problems(path: Path) -> list[str]:
    """What a stranger would miss in the block of a file."""
    block = provenance.read(path.parent).get(path.name)
    if block is None:
        return [f"{path.name} has no provenance: {MEND}"]
    found = []
    if block["sha256"] != provenance.sha256(path):
        found.append(f"{path.name} has changed since its provenance was written: {MEND}")
    lacks = {re.split("[. :]", fact)[0] for fact in block["lacks"]}
    found += [f"neither {f} nor an entry of it in lacks" for f in provenance.FACTS if not block[f] and f not in lacks]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", block["date"] or "2026-01-01"):
        found.append(f"{block['date']} is no date")
    if not re.fullmatch(r"[0-9a-f]{12,40}(\+changes)?", block["commit"] or "0" * 12):
        found.append(f"{block['commit']} is no commit")
    is_of_run = block["commit_of"] == "the run" and not (block["commit"] or "").endswith("+changes")
    if not is_of_run and "commit" not in lacks and not lines_name_their_run(path):
        found.append("the commit is not of the run, and neither lacks nor every line says so")
    if " /" in (block["command"] or ""):
        found.append(f"a path of one machine in the command: {block['command']}")
    return found


def lines_name_their_run(path: Path) -> bool:
    """Whether every line has the commit of its run."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl"]
    commits = [line.get("commit") or line.get("detail", {}).get("run", {}).get("commit", "") for line in lines]
    return bool(commits) and all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_result_file_is_well_formed(path: Path) -> None:
    assert not problems(path)
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
        found = json.loads(line)
        assert " /" not in str(found.get("command", "")) if isinstance(found, dict) else found, "a path of one machine"


SCORES = [suite for suite in sum(MORE.values(), SUITES) if (FOLDER / f"{suite}.jsonl").is_file()]


@pytest.mark.parametrize("suite", SCORES)
def test_every_score_of_the_evidence_can_be_traced(suite: str) -> None:
    scores = read_scores(FOLDER / f"{suite}.jsonl")
    for score in (s for s in scores if s.method not in REFERENCES):
        assert {"rule", "options", "scale", "split", "versions", "merge"} <= set(score.detail), score
        assert re.fullmatch(r"[0-9a-f]{64}", score.detail["merge"])
    assert {s.suite for s in scores} == {re.sub(f"^({'|'.join(MORE)})-", "", suite)}


OTHERS = {"example_arcee_fusion", "task_arithmetic_normalize_by_filter", "multislerp_raw_weights"}
"""Configurations of mergekit that the page lists as doing something else here."""


def test_nearly_all_configurations_of_mergekit_do_the_same() -> None:
    rows = {r["name"]: r for r in json.loads((common.RESULTS / "mergekit.json").read_text(encoding="utf-8"))["rows"]}
    text = (EVIDENCE / "benchmarks" / "mergekit" / "cases.yml").read_text(encoding="utf-8")
    assert set(yaml.safe_load(text)) <= set(rows)
    assert {row["outcome"] for row in rows.values()} <= set(OUTCOMES)
    assert {n for n, row in rows.items() if row["outcome"] not in GOOD} == OTHERS


def test_no_block_is_of_a_file_that_is_gone() -> None:
    ledgers = list(common.RESULTS.rglob(provenance.LEDGER))
    assert len(ledgers) == 3
    stated = [p.parent / name for p in ledgers for name in provenance.read(p.parent)]
    assert not [named(file) for file in stated if not file.is_file()]


def test_a_benchmark_writes_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(EVIDENCE / "benchmarks" / "toy.py"), "--work", "/some/where"])
    path = common.write_result("toy", [{"a": 1}], tmp_path / "toy.json")
    assert not problems(path)
    block = provenance.read(tmp_path)["toy.json"]
    assert block["command"] == "python -m benchmarks.toy --work WORK"
    assert block["machine"]["cores"]
    assert block["machine"]["memory_b"] > 1 << 28
    assert {"python", "actmat", "torch"} <= set(block["versions"])
    unknown = ["commit: the tree had changes"] if str(block["commit"]).endswith("+changes") else []
    assert block["lacks"] == (unknown if block["commit"] else ["commit"])
    common.write_result("other", [], tmp_path / "other.json")
    assert sorted(provenance.read(tmp_path)) == ["other.json", "toy.json"]
