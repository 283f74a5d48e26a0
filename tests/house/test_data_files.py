"""The data of the suites: sources, hashes, and their making from a stand-in of the public originals."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from benchmarks.data.__main__ import check, content_hash, fetch
from benchmarks.data.images import orders
from benchmarks.data.table import IMAGES, TEXTS, DataFile, files
from tests.helpers.repository import ROOT

from actmat.errors import CheckpointError
from actmat_experiments.pretrained.text_tasks import TASKS as TEXT_TASKS

REPO, COMMIT = "someone/originals", "0" * 40


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Folder of a repository's files, and the address of its server."""
    folder = tmp_path / "site"
    (folder / REPO / COMMIT).mkdir(parents=True)
    (folder / REPO / "tar.gz").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder / REPO, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def row(name: str, sha256: str) -> DataFile:
    return DataFile(name, REPO, COMMIT, 0, sha256, "MIT")


def test_every_file_has_a_source_a_hash_and_a_recipe() -> None:
    found = files()
    assert set(found) == {*TEXTS, *IMAGES}
    assert len(found) == 36
    for file in found.values():
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256), file
        assert re.fullmatch(r"[0-9a-f]{40}", file.commit), file
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", file.repo), file
        assert file.bytes > 10_000, file
        assert file.license, file


def test_the_suites_find_their_files_in_the_table() -> None:
    assert {f"text/{name}" for source in TEXT_TASKS.values() for name in source.files} <= set(TEXTS)
    pages = "".join((ROOT / "docs" / "experiments" / f"{p}.md").read_text() for p in ("vision-small", "text-minilm"))
    assert "python -m benchmarks.data" in pages


def test_a_text_is_made_checked_and_kept(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mirror = site
    (folder / COMMIT / "data").mkdir()
    (folder / COMMIT / "data" / "TREC.test.all").write_bytes("1 What is caf\xe9 ?\n0 Who ran ?\n\n".encode("latin-1"))
    want = '{"text": "What is café ?", "label": 1}\n{"text": "Who ran ?", "label": 0}\n'.encode()
    file = row("text/trec.test.jsonl", content_hash("a", want))
    assert fetch(file, tmp_path / "out", mirror) == "made"
    path = tmp_path / "out" / file.name
    assert path.read_bytes() == want
    assert fetch(file, tmp_path / "out", "http://127.0.0.1:9") == "there", "no network for what is there"
    path.write_text("other")
    with pytest.raises(CheckpointError, match="remove it, and fetch it again"):
        fetch(file, tmp_path / "out", mirror)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        check(file, tmp_path / "out")


def test_another_content_is_refused_and_not_written(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, mirror = site
    (folder / COMMIT / "data").mkdir()
    (folder / COMMIT / "data" / "HumanEval.jsonl.gz").write_bytes(b"changed since")
    file = row("reasoning/HumanEval.jsonl.gz", "a" * 64)
    with pytest.raises(CheckpointError, match=f"expected {'a' * 64}.*nothing was written"):
        fetch(file, tmp_path / "out", mirror)
    assert not (tmp_path / "out").exists()


def test_orders_name_each_image_once() -> None:
    assert set(orders()) >= {"dtd10.train", "dtd10.test", "usps.test"}
    for name, order in orders().items():
        assert len(set(order)) == len(order), name
    assert sorted([*orders()["dtd10.train"], *orders()["dtd10.test"]]) == list(range(1200))
