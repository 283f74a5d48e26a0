"""The data of the suites: sources, hashes, and their making from a stand-in of the public originals."""

from __future__ import annotations

import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from benchmarks.data import table
from benchmarks.data.__main__ import array_hash, check, chosen, content_hash, fetch, main
from benchmarks.data.images import Folder, drawn, orders
from benchmarks.data.originals import Original
from benchmarks.data.table import IMAGES, TEXTS, DataFile, files
from PIL import Image
from tests.helpers.repository import ROOT

from actmat.errors import CheckpointError
from actmat_experiments.pretrained.text_tasks import TASKS as TEXT_TASKS
from actmat_experiments.vision.images import open_npz

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
    assert len(found) == 37
    for file in found.values():
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256), file
        assert re.fullmatch(r"[0-9a-f]{40}", file.commit), file
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", file.repo), file
        assert file.bytes > 10_000, file
        assert file.licence, file


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


def test_a_missing_original_and_a_cut_archive_are_errors_with_a_way_out(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, mirror = site
    with pytest.raises(CheckpointError, match=r"404.*another copy of it"):
        fetch(row("text/wsc.val.jsonl", "a" * 64), tmp_path, mirror)
    (folder / "tar.gz" / COMMIT).write_bytes(b"\x1f\x8b cut")
    with pytest.raises(CheckpointError, match="is no whole archive"):
        fetch(row("images/mnist.npz", "a" * 64), tmp_path, mirror)


def archive(images: dict[str, np.ndarray]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as out:
        for path, pixels in images.items():
            png = io.BytesIO()
            Image.fromarray(pixels).save(png, "PNG")
            member = tarfile.TarInfo(f"originals-{COMMIT}/{path}")
            member.size = len(png.getvalue())
            out.addfile(member, io.BytesIO(png.getvalue()))
    return stream.getvalue()


def test_images_are_drawn_from_an_archive_and_read_by_the_suites(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mirror = site
    generator = np.random.default_rng(3)
    paths = [f"{part}/{c}/{n}.png" for part in ("train", "test") for c in ("cat", "dog") for n in range(6)]
    images = {p: generator.integers(0, 256, (40, 50, 3), dtype=np.uint8) for p in (*reversed(paths), "README.png")}
    (folder / "tar.gz" / COMMIT).write_bytes(archive(images))
    recipe = Folder("toy", "t", ".png", 1, (8, 4), part=0, centre=True)
    arrays = recipe(Original(REPO, COMMIT, mirror))
    assert {k: v.shape for k, v in arrays.items() if k[0] == "x"} == {
        "x_train": (8, 32, 32, 3),
        "x_test": (4, 32, 32, 3),
    }
    assert np.bincount(arrays["y_train"]).tolist() == [4, 4]
    middle = Image.fromarray(images[paths[0]]).crop((5, 0, 45, 40)).resize((32, 32), Image.Resampling.BICUBIC)
    again = recipe(Original(REPO, COMMIT, mirror))
    assert array_hash(arrays) == array_hash(again)
    every = Folder("toy", "t", ".png", 1, (12, 12), part=0, centre=True)(Original(REPO, COMMIT, mirror))
    assert any(np.array_equal(x, np.asarray(middle)) for x in every["x_train"])
    monkeypatch.setitem(table.IMAGES, "images/toy.npz", recipe)
    file = row("images/toy.npz", array_hash(arrays))
    assert fetch(file, tmp_path / "out", mirror) == "made"
    task = open_npz(tmp_path / "out" / file.name)
    assert (task.class_names, len(task.train.labels)) == (("cat", "dog"), 8)
    check(file, tmp_path / "out")
    with pytest.raises(CheckpointError, match="has SHA-256"):
        check(replace(file, sha256="b" * 64), tmp_path / "out")


def test_a_draw_is_stratified_and_never_repeats() -> None:
    labels = np.array([0] * 60 + [1] * 30 + [2])
    found = drawn(labels, 30, np.random.default_rng(0))
    assert len(set(found.tolist())) == len(found) <= 30
    assert np.bincount(labels[found]).tolist() in ([20, 10, 1], [20, 9, 1], [19, 10, 1])


def test_orders_name_each_image_once() -> None:
    assert set(orders()) >= {"dtd10.train", "dtd10.test", "usps.test"}
    for name, order in orders().items():
        assert len(set(order)) == len(order), name
    assert sorted([*orders()["dtd10.train"], *orders()["dtd10.test"]]) == list(range(1200))


def test_conversions_of_questions(site: tuple[Path, str]) -> None:
    folder, mirror = site
    original, here = Original(REPO, COMMIT, mirror), folder / COMMIT
    (here / "dataset" / "winogrande").mkdir(parents=True)
    ask = "Please choose the correct answer to fill in the blank to complete the given sentence: A saw B, _ fled."
    rows = [{"instruction": f"{ask}\n\nOption1: A Option2: B Answer format: option1/option2", "answer": "option2"}]
    (here / "dataset" / "winogrande" / "test.json").write_text(json.dumps(rows))
    assert json.loads(TEXTS["text/winogrande.dev.jsonl"](original)) == {
        "sentence": "A saw B, _ fled.",
        "option1": "A",
        "option2": "B",
        "label": "option2",
    }
    (here / "dataset" / "winogrande" / "test.json").write_text(
        json.dumps([{"instruction": "Else", "answer": "option1"}])
    )
    with pytest.raises(CheckpointError, match="unexpected instruction: Else"):
        TEXTS["text/winogrande.dev.jsonl"](original)
    (here / "WikiQA" / "dev").mkdir(parents=True)
    long = " ".join(map(str, range(50)))
    for name, lines in {
        "id.txt": "1\n1\n2\n",
        "a.toks": "q\nq\nr\n",
        "b.toks": f"{long}\nx\ny\n",
        "sim.txt": "1\n0\n0\n",
    }.items():
        (here / "WikiQA" / "dev" / name).write_text(lines)
    found = [json.loads(x) for x in TEXTS["text/wikiqa.dev.jsonl"](original).splitlines()]
    assert [(r["qid"], r["label"]) for r in found] == [("1", 1), ("1", 0)], "no answer to 2 is right"
    assert len(found[0]["sentence"].split()) == 40


def test_the_command_says_what_it_did(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, mirror = site
    monkeypatch.setattr("sys.argv", ["data", str(tmp_path), "--only", "text/wsc.val", "--mirror", mirror])
    assert main() == 1
    assert "text/wsc.val.jsonl: FAILED" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["data", "--list", "--only", "text/trec"])
    assert main() == 0
    out = capsys.readouterr().out
    assert "harvardnlp/sent-conv-torch" in out
    assert out.count("text/trec.") == 2
    with pytest.raises(CheckpointError, match="No file begins with text/tree"):
        chosen(files(), ["text/tree"])
