"""Servers that lie, in a table for the hub, web servers and S3: refused before it is used, and nothing is written."""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

import fsspec
import pytest
import torch
from huggingface_hub import close_session, constants
from safetensors.torch import save
from tests.helpers.serving import Handler, serve
from torch import Tensor

from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError
from actmat.extras.remote import claims, retry
from actmat.extras.remote.hub import open_repository

SHA, OTHER = "a" * 40, "b" * 40
NAME = "model.safetensors"
TENSORS = {f"w.{i}": torch.full((300, 300), float(i)) for i in range(2)}
WEIGHTS = save(TENSORS)
FILES = {NAME: WEIGHTS, "config.json": b'{"model_type": "tiny"}'}
Answer = dict[str, Any]
Lie = Callable[[Answer], object]


class Liar:
    """A hub, a web server and a bucket of the same files; `lie` changes a file's answer, `listing` the hub's list."""

    def __init__(self) -> None:
        self.lie: Lie = lambda answer: None
        self.listing: Lie = lambda info: None
        self.commit, self.rows = SHA, ""
        self.url = ""

    def file(self, name: str, wanted: str) -> Answer:
        data = FILES[name]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        first, last = (int(found[1]), min(int(found[2]), len(data) - 1)) if found else (0, len(data) - 1)
        etag = hashlib.sha256(data).hexdigest()
        answer: Answer = {"name": name, "status": 206 if found else 200, "body": data[first : last + 1], "first": first}
        answer["headers"] = {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes",
                             "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}  # fmt: skip
        if found:
            answer["headers"]["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.lie(answer)
        return answer

    def info(self) -> bytes:
        rows = [{"rfilename": n, "size": len(d), "blobId": hashlib.sha1(d).hexdigest()} for n, d in FILES.items()]
        rows[0]["lfs"] = {"sha256": hashlib.sha256(WEIGHTS).hexdigest(), "size": len(WEIGHTS), "pointerSize": 1}
        info = {"id": "org/tiny", "sha": self.commit, "siblings": rows}
        self.listing(info)
        return json.dumps(info).encode()

    def bucket(self) -> bytes:
        rows = "".join(
            f"<Contents><Key>m/{n}</Key><Size>{len(d)}</Size><ETag>&quot;{hashlib.sha256(d).hexdigest()}&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for n, d in FILES.items()
        )
        return (f'<?xml version="1.0"?><ListBucketResult><Name>b</Name><Prefix>m/</Prefix><IsTruncated>false'
                f"</IsTruncated>{rows}{self.rows}</ListBucketResult>").encode()  # fmt: skip


class _Handler(Handler):
    liar: Liar

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            return self._send(200, self.liar.info(), {})
        if path.rstrip("/") == "/b":
            return self._send(200, self.liar.bucket(), {"Content-Type": "application/xml"})
        name = path.rpartition("/")[2]
        if name not in FILES:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        answer = self.liar.file(name, self.headers.get("Range", ""))
        return self._send(answer["status"], answer["body"], answer["headers"])

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def serving() -> Iterator[Liar]:
    liar = Liar()
    with serve(type("Handler", (_Handler,), {"liar": liar})) as liar.url:
        yield liar


@pytest.fixture
def liar(serving: Liar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    """The server, honest; the hub library and S3 ask it."""
    serving.__dict__.update(Liar().__dict__ | {"url": serving.url})
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(constants, "ENDPOINT", serving.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", serving.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name, value in {"AWS_ENDPOINT_URL": serving.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                        "AWS_DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    close_session()
    (tmp_path / "notes.txt").write_text("mine")
    yield serving
    close_session()
    outside = {p.name for p in tmp_path.iterdir()}
    assert outside <= {"notes.txt", "home"}
    assert (tmp_path / "notes.txt").read_text() == "mine"


PLACES = {"hub": "hf://org/tiny", "hub, downloaded": "org/tiny", "web": "{url}/m", "s3": "s3://b/m"}


def read(liar: Liar, store: str) -> dict[str, Tensor]:
    place = PLACES[store].format(url=liar.url)
    with open_model(place) as checkpoint:
        assert checkpoint.config == {"model_type": "tiny"}
        return {name: checkpoint.tensors.read(name) for name in checkpoint.specs}


@pytest.mark.parametrize("store", PLACES)
def test_an_honest_server_is_read(liar: Liar, store: str) -> None:
    found = read(liar, store)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def later(change: Lie) -> Lie:
    """A lie in answers after the first one about the weights."""

    def lie(answer: Answer) -> None:
        if answer["name"] == NAME and answer["first"] > 0:
            change(answer)

    return lie


def header(name: str, value: str) -> Lie:
    return lambda answer: answer["headers"].update({name: value})


def other_range(answer: Answer) -> None:
    size = len(answer["body"])
    answer["body"] = WEIGHTS[:size]
    answer["headers"]["Content-Range"] = f"bytes 0-{size - 1}/{len(WEIGHTS)}"


def no_range(answer: Answer) -> None:
    del answer["headers"]["Content-Range"]


def shifted(answer: Answer) -> None:
    answer["headers"]["Content-Range"] = f"bytes {answer['first'] + 4}-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"


def other_total(answer: Answer) -> None:
    answer["headers"]["Content-Range"] = answer["headers"]["Content-Range"].replace(str(len(WEIGHTS)), "999999999")


def longer(answer: Answer) -> None:
    answer["body"] += b"more"


RANGES: dict[str, Lie] = {
    "another range": other_range,
    "no range": no_range,
    "a shifted range": shifted,
    "another total": other_total,
    "more bytes than the range": longer,
    "a total of 4,000 digits": header("Content-Range", f"bytes 0-9/{'9' * 4000}"),
    "a total of 5,000 digits": header("Content-Range", f"bytes 0-9/{'9' * 5000}"),
    "another unit": header("Content-Range", "lines 0-9/10"),
    "another version": header("ETag", f'"{"c" * 64}"'),
}


@pytest.mark.parametrize("store", ["hub", "web", "s3"])
@pytest.mark.parametrize("kind", RANGES)
def test_ranges_totals_and_versions(liar: Liar, store: str, kind: str) -> None:
    liar.lie = later(RANGES[kind])
    with pytest.raises(CheckpointError, match=re.escape(NAME)):
        read(liar, store)


COMMITS = (
    "../../../notes.txt",
    "../" * 5 + "notes.txt",
    "/etc/x",
    "",
    "main",
    "A" * 40,
    "a" * 39,
    "a" * 41,
    "a" * 40 + "\n",
    OTHER,
)


@pytest.mark.parametrize("commit", COMMITS)
def test_commits_of_a_hub(liar: Liar, commit: str) -> None:
    liar.listing = lambda info: info.update(sha=commit)
    with pytest.raises(CheckpointError, match="commit"):
        open_repository("org/tiny", SHA)
    if commit != OTHER:
        with pytest.raises(CheckpointError, match="40 hexadecimal digits"):
            open_repository("org/tiny", None)


@pytest.mark.parametrize("store", ["hub", "hub, downloaded"])
@pytest.mark.parametrize("commit", ["../../../notes.txt", "/etc/x", "main", OTHER])
def test_commits_in_headers_of_a_hub(liar: Liar, store: str, commit: str) -> None:
    liar.lie = header("X-Repo-Commit", commit)
    with pytest.raises(CheckpointError, match="commit"):
        read(liar, store)


@pytest.mark.parametrize("name", ["ETag", "X-Linked-Etag"])
@pytest.mark.parametrize("etag", ["../../../../notes.txt", "..", 'W/"../x"', "a" * 300])
def test_etags_of_a_hub_name_no_other_place(liar: Liar, name: str, etag: str) -> None:
    liar.lie = header(name, etag)
    with pytest.raises(CheckpointError, match=f"expected a plain {name}"):
        read(liar, "hub, downloaded")


def test_the_check_of_headers_survives_a_new_client(liar: Liar) -> None:
    read(liar, "hub, downloaded")
    close_session()
    from huggingface_hub import get_session

    assert claims.check_headers in get_session().event_hooks["response"]


@pytest.mark.parametrize("twice", [False, True])
def test_a_download_has_the_announced_sha256(liar: Liar, twice: bool) -> None:
    wrong = WEIGHTS[:-4] + b"abcd"

    def lie(answer: Answer) -> None:
        if answer["name"] == NAME and answer["status"] == 200:
            answer["body"] = wrong

    liar.lie = lie
    for _ in range(1 + twice):  # what was refused is not in the cache
        with pytest.raises(CheckpointError, match=r"not what the hub announced: SHA-256"):
            read(liar, "hub, downloaded")
    liar.lie = lambda answer: None
    assert torch.equal(read(liar, "hub, downloaded")["w.1"], TENSORS["w.1"])


ODD_NAMES = (
    "/etc/more.json",
    "../x",
    "a/../../x",
    "a\\b",
    "\x00",
    "x\n",
    "",
    "n" * 300,
    "a//b",
    "./x",
)


def test_odd_names_in_a_listing_are_left_out(liar: Liar) -> None:
    more = [{"rfilename": name, "size": 5, "blobId": OTHER} for name in ODD_NAMES]
    liar.listing = lambda info: info["siblings"].extend(more)
    assert read(liar, "hub, downloaded").keys() == TENSORS.keys()
    assert set(open_repository("org/tiny", None).files) == set(FILES)
    (note,) = open_model("org/tiny").folder.notes
    assert note.text.endswith(f"left out ({len(ODD_NAMES)}): '/etc/more.json', '../x', 'a/../../x', ...")
    assert open_repository("org/tiny", None).fetch_sidecars() is not None
    liar.rows = "".join(
        f"<Contents><Key>m/{escape(name)}</Key><Size>5</Size><ETag>x</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name in ODD_NAMES
        if name.isprintable()
    )
    assert read(liar, "s3").keys() == TENSORS.keys()
    assert "left out (" in open_model(PLACES["s3"].format(url=liar.url)).folder.notes[0].text


def edit(**fields: Any) -> Lie:
    return lambda info: info.update(fields)


def row(**fields: Any) -> Lie:
    return lambda info: info["siblings"][0].update(fields)


LISTINGS: dict[str, Lie] = {
    "no files": edit(siblings=None),
    "files that are a number": edit(siblings=5),
    "files that are texts": edit(siblings=["a"]),
    "files without names": edit(siblings=[{"size": 5}]),
    "a commit that is a list": edit(sha=[SHA]),
    "no commit": edit(sha=None),
    "a date that is text": edit(lastModified="yesterday"),
    "a size of 4,000 digits": row(size=10**4000),
    "a negative size": row(size=-1),
    "a size that is text": row(size="5"),
    "a fraction": row(size=0.5),
    "a size that is a list": row(size=[5]),
    "hashes that are lists": row(lfs={"sha256": ["a"], "size": 5, "pointerSize": 1}),
    "hashes that are text": row(lfs="a"),
    "a hash of control characters": row(lfs={"sha256": "\x1b[2J", "size": 5, "pointerSize": 1}),
    "a name that is a number": row(rfilename=5),
    "a list that nests deeply": edit(siblings=functools.reduce(lambda x, _: [x], range(500), [])),
    "a file twice": lambda info: info["siblings"].append(info["siblings"][0] | {"size": 7}),
}


@pytest.mark.parametrize("kind", LISTINGS)
def test_listings_of_a_hub(liar: Liar, kind: str) -> None:
    liar.listing = LISTINGS[kind]
    with pytest.raises(CheckpointError, match="org/tiny"):
        open_tensors("org/tiny")


@pytest.mark.parametrize(
    ("size", "etag"), [("-5", "x"), ("9" * 4000, "x"), ("x", "x"), ("5", "x" * 600), ("5", "\u202e")]
)
def test_listings_of_a_bucket(liar: Liar, size: str, etag: str) -> None:
    liar.rows = (f"<Contents><Key>m/more.json</Key><Size>{size}</Size><ETag>{etag}</ETag>"
                 "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>")  # fmt: skip
    with pytest.raises(CheckpointError, match="s3://b/m"):
        read(liar, "s3")


def test_a_commit_in_the_cache_of_the_hub(liar: Liar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(liar, "hub, downloaded")
    home = tmp_path / "home" / "hub" / "models--org--tiny"
    (home / "refs" / "main").write_text("../../../..")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="40 hexadecimal digits"):
        open_tensors("org/tiny")
