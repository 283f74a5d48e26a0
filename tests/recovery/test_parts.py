"""Merges in parts, by processes of their own: the bytes of one run, whatever is repeated, missing or killed."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.docs_fixture import write_adapter
from tests.helpers.merge_server import Server, merge_server
from tests.helpers.merging import NORM, Family, Outcome, actmat, contents, hidden

import actmat as library
from actmat.checkpoints.writing.journal import Journal
from actmat.diagnostics.model import read_diagnosis
from actmat.errors import OutputError, RecipeError
from actmat.extras.parts.stage import SharedStage

LAYERS = 12
FLAGS = ("--max-shard-size", "6kB", "--method", "ties", "--option", "trim=global", "--no-fsync")
"""Several shards, which parts share, and a survey of the whole model."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(merge_server(tmp_path_factory.mktemp("server"))) for _ in range(2)]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.make(tmp_path_factory.mktemp("family"), layers=LAYERS)


@pytest.fixture(scope="module")
def expected(family: Family) -> dict[str, bytes]:
    """Files of an undisturbed merge in one run."""
    out = family.root / "reference" / "out"
    assert actmat(family.argv("--out", str(out), *FLAGS)).code == 0
    return contents(out)


@pytest.fixture
def out(family: Family, request: pytest.FixtureRequest) -> Path:
    """As deep as the reference, because a manifest tells where the inputs lie as seen from the output."""
    folder = family.root / re.sub(r"\W", "-", request.node.name)
    folder.mkdir()
    return folder / "out"


def argv(family: Family, out: Path, part: str, *flags: str) -> list[str]:
    return family.argv("--out", str(out), *FLAGS, "--part", part, *flags)


def run(family: Family, out: Path, part: str, *flags: str) -> Outcome:
    return actmat(argv(family, out, part, *flags))


def finish(out: Path, *flags: str) -> Outcome:
    return actmat(["merge", "--finish", str(out), "--no-fsync", *flags])


def test_parts_at_the_same_time_give_the_bytes_of_one_run(
    servers: list[Server], family: Family, out: Path, expected: dict[str, bytes]
) -> None:
    """The same part twice at once, too: both make the folder, and write the same bytes to the same places."""
    for parts in (("1/3", "2/3"), ("3/3", "3/3")):
        running = [server.start(argv(family, out, part)) for server, part in zip(servers, parts, strict=True)]
        for one in running:
            status, errors = one.wait()
            assert status == 0, errors
        assert not out.exists()
    assert hidden(out.parent) == [".out.actmat-parts"]
    assert finish(out).code == 0
    assert contents(out) == expected
    assert hidden(out.parent) == []


def test_a_killed_part_goes_on(servers: list[Server], family: Family, out: Path, expected: dict[str, bytes]) -> None:
    journals = out.parent / ".out.actmat-parts" / "journals"
    for _ in range(40):  # on a busy machine the part may end before the signal is delivered: then once more
        one = servers[0].start(argv(family, out, "1/1"))
        while time.monotonic() - one.began < 60:
            if any(p.read_bytes().count(b"\n") > 5 for p in journals.glob("*")):
                break
            time.sleep(0.0005)
        one.signal(signal.SIGKILL)
        if one.wait()[0] == -signal.SIGKILL:
            break
        shutil.rmtree(out.parent / ".out.actmat-parts")
    failed = finish(out)
    assert failed.code == 1
    assert "part 1/1 is not finished" in failed.err
    again = actmat([a for a in argv(family, out, "1/1") if a != "--quiet"])
    assert re.search(r"[1-9]\d* of them from an earlier attempt", again.out), again
    assert finish(out).code == 0
    assert contents(out) == expected


def test_a_missing_part_is_named_with_its_command(family: Family, out: Path, expected: dict[str, bytes]) -> None:
    assert run(family, out, "1/3").code == run(family, out, "3/3").code == 0
    before = sorted(p.name for p in (out.parent / ".out.actmat-parts" / "model").iterdir())
    failed = finish(out)
    assert failed.code == 1
    assert "1 of 3 parts are not ready" in failed.err
    command = re.search(r"part 2/3 is missing \(\d+ tensors\). Run it: actmat (merge .*--part 2/3)", failed.err)
    assert command is not None, failed.err
    assert sorted(p.name for p in (out.parent / ".out.actmat-parts" / "model").iterdir()) == before
    assert actmat(command[1].split()).code == 0
    assert finish(out).code == 0
    assert contents(out) == expected


def test_repetitions_change_nothing(family: Family, out: Path, expected: dict[str, bytes]) -> None:
    for part in ("1/2", "2/2", "2/2"):
        assert run(family, out, part).code == 0
    assert finish(out, "--no-check").code == 0
    assert "its inputs, are intact" in finish(out).out
    late = actmat([a for a in argv(family, out, "2/2") if a != "--quiet"])
    assert late.code == 0
    assert "all parts were finished earlier" in late.out
    assert contents(out) == expected
    assert hidden(out.parent) == []
    (shard, *_) = sorted(out.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "not as it was written" in finish(out).err


def test_parts_of_another_merge_are_refused_with_what_differs(family: Family, out: Path, tmp_path: Path) -> None:
    assert run(family, out, "1/2").code == 0
    refused = run(family, out, "2/3", "--option", "density=0.4", "--diagnose")
    assert refused.code == 1
    assert "the merge there is in 2 parts, this is one of 3" in refused.err
    assert "made without --diagnose" in refused.err
    assert "recipe: 'options' is {'trim': 'global'} there, {'trim': 'global', 'density': 0.4} here" in refused.err
    plain = actmat(family.argv("--out", str(out), *FLAGS))
    assert plain.code == 1
    assert "parts of a merge into" in plain.err
    other = Family.make(tmp_path, layers=1)
    foreign = actmat(other.argv("--out", str(out), "--part", "2/2"))
    assert "base: model.safetensors has" in foreign.err or "recipe: 'base' is" in foreign.err


def test_changed_inputs_are_refused(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    assert run(family, family.out, "1/2").code == run(family, family.out, "2/2").code == 0
    family.change(family.experts[1], lambda tensors: tensors[NORM].mul_(2.0))
    assert re.search("expert 'expert1': .*safetensors was written at another time", run(family, family.out, "1/2").err)
    failed = finish(family.out)
    assert "Files of expert1 have changed since the parts were made" in failed.err
    assert not family.out.exists()


def test_bytes_that_the_disk_lost_are_found_and_made_again(
    family: Family, out: Path, expected: dict[str, bytes]
) -> None:
    for part in ("1/2", "2/2"):
        assert run(family, out, part).code == 0
    (first, *_) = sorted((out.parent / ".out.actmat-parts" / "model").glob("*.safetensors"))
    lost = first.read_bytes()
    first.write_bytes(lost[:-8] + bytes(8))
    failed = finish(out)
    found = re.search(r"part (\d)/2: 1 tensors are not on the disk as it wrote them, such as", failed.err)
    assert found is not None, failed.err
    assert run(family, out, f"{found[1]}/2").code == 0
    assert finish(out).code == 0
    assert contents(out) == expected


@pytest.mark.parametrize("damage", ["size", "header"])
def test_a_damaged_shard_stops_a_part(family: Family, out: Path, damage: str) -> None:
    assert run(family, out, "1/2").code == 0
    (first, *_) = sorted((out.parent / ".out.actmat-parts" / "model").glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-1] if damage == "size" else content[:20] + b"?" + content[21:])
    failed = run(family, out, "2/2")
    assert failed.code == 1
    assert f"{first} is damaged" in failed.err
    assert "rm -r" in failed.err


def test_more_parts_than_tensors_and_an_output_that_is_replaced(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    flags = ("--no-fsync", "--overwrite")
    assert actmat(family.argv(*flags, "--method", "average")).code == 0
    for number in range(1, 12):
        assert actmat(family.argv(*flags, "--part", f"{number}/11")).code == 0
    assert "--overwrite" in finish(family.out).err
    assert finish(family.out, "--overwrite").code == 0
    in_parts = contents(family.out)
    assert actmat(family.argv(*flags)).code == 0
    assert contents(family.out) == in_parts
    assert hidden(tmp_path) == []


def test_a_diagnosis_in_parts(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    whole = library.merge(family.base, family.experts, out=family.out, diagnose=True, durable=False).diagnosis
    shutil.rmtree(family.out)
    for part in ("1/2", "2/2"):
        library.merge_part(family.base, family.experts, part=part, out=family.out, diagnose=True, durable=False)
    report = library.finish(family.out)
    found = read_diagnosis(family.out)
    assert whole is not None
    assert found.measures
    assert found.measures == whole.measures
    assert found.checks == whole.checks
    assert report.parts == 2
    assert library.verify(family.out).ok


def test_an_adapter_in_parts(tmp_path: Path) -> None:
    for t in (0, 1):
        write_adapter(tmp_path / f"lora{t}", seed=t)
    experts = [tmp_path / f"lora{t}" for t in (0, 1)]
    library.merge(None, experts, out=tmp_path / "whole", durable=False)
    for part in ("2/2", "1/2"):
        done = library.merge_part(None, experts, part=part, out=tmp_path / "parts", durable=False)
        assert done.items > 0
    assert library.finish(tmp_path / "parts").totals.norms is not None
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert whole == parts


def test_an_error_that_would_recur_keeps_nothing_to_go_on_with(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=2)
    family.change(family.experts[0], lambda tensors: tensors[NORM].fill_(float("nan")))
    failed = actmat(family.argv("--part", "1/1"))
    assert failed.code == 1
    assert f"tensor '{NORM}' of expert 'expert0' has 8 values" in failed.err
    assert "kept" not in failed.err, "nothing of it could be used with other inputs"
    assert not family.out.exists()


def test_an_error_that_may_pass_keeps_what_the_part_has_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.make(tmp_path, layers=2)
    write, calls = Journal.append, []

    def failing(journal: Journal, entry: Mapping[str, Any]) -> None:
        calls.append(entry)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(journal, entry)

    monkeypatch.setattr(Journal, "append", failing)
    failed = actmat(family.argv("--part", "1/1"))
    assert failed.code == 1
    assert "the disk is full" in failed.err
    assert "3 of 11 tensors of part 1/1 are kept" in failed.err
    assert actmat(family.argv("--part", "1/1")).code == finish(family.out).code == 0
    assert len(calls) == 4 + 8


def test_one_folder_however_many_make_it(tmp_path: Path) -> None:
    """All prepare a folder before one of them renames its own."""
    barrier, errors = threading.Barrier(6), []

    def write_plan(path: Path) -> None:
        path.write_text("plan")
        barrier.wait(10)

    def make() -> None:
        try:
            SharedStage(tmp_path / "out").create({"parts": 2, "fingerprint": "f"}, write_plan, ())
        except OutputError as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert hidden(tmp_path) == [".out.actmat-parts"]
    assert SharedStage(tmp_path / "out").head()["parts"] == 2


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    stage = SharedStage(tmp_path / "out")
    (tmp_path / ".out.actmat-parts").write_text("mine")
    with pytest.raises(OutputError, match="in the way: expected the folder of a merge's parts, found a file"):
        stage.create({"parts": 1}, lambda path: None, ())
    (tmp_path / ".out.actmat-parts").unlink()
    stage.create({"parts": 1}, lambda path: None, ())
    (stage.folder / "parts.json").write_text("[")
    with pytest.raises(OutputError, match="is damaged"):
        stage.head()
    (stage.folder / "parts.json").write_text('{"actmat_parts": 2}')
    with pytest.raises(OutputError, match="another version"):
        stage.head()
    assert "There are no parts of a merge into" in finish(tmp_path / "elsewhere").err


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/200000"])
def test_a_part_that_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="the third of sixteen, counted from 1"):
        library.merge_part("base", ["e"], part=text, out=tmp_path / "out")


def test_parts_are_of_one_merge(family: Family, out: Path) -> None:
    failed = run(family, out, "1/2", "--method", "average")
    assert failed.code == 2
    assert "one method" in failed.err


def test_a_plan_of_one_part(family: Family) -> None:
    shown = actmat(family.argv(*FLAGS[:-1], "--part", "2/3", command="plan"))
    assert shown.code == 0
    assert re.search(r"part 2/3: \d+ of 51 tensors", shown.out), shown
    assert "each pass of the survey of the whole model reads" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    as_json = actmat(family.argv("--part", "2/3", "--json", "--full", command="plan"))
    assert '"survey_bytes": 0' in as_json.out
