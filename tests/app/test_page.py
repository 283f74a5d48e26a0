"""The page itself, where Gradio is installed: who may open it, and a merge through its own requests."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.conftest import SECRET
from tests.helpers.merging import Family

if importlib.util.find_spec("gradio") is None:
    pytest.skip("Gradio is not installed: pip install 'gradio>=6.31'", allow_module_level=True)


class Opener:
    """Requests to a running page."""

    def __init__(self, url: str) -> None:
        self.url, _, self.token = url.partition("?token=")
        self.cookie = f"actmat-token={self.token}"

    def __call__(self, path: str = "", data: Any = None, **headers: str) -> Any:
        body = None if data is None else json.dumps(data).encode()
        given = {"Cookie": self.cookie, "Content-Type": "application/json", **headers}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, body, given), timeout=60)

    def click(self, button: int, *values: Any) -> list[Any]:
        """Press a button and wait for the values that it sets."""
        job = {"data": list(values), "fn_index": button, "session_hash": "me"}
        self("gradio_api/queue/join", job).read()
        for line in self("gradio_api/queue/data?session_hash=me"):
            said = json.loads(line.removeprefix(b"data:")) if line.startswith(b"data:") else {}
            if said.get("msg") == "process_completed":
                assert said["success"], said
                return list(said["output"]["data"])
        raise AssertionError("the page gave no answer")


@pytest.fixture(scope="module")
def page() -> Iterator[Opener]:
    server = subprocess.Popen(
        [sys.executable, "-m", "actmat", "ui", "--no-browser", "--quiet"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    yield Opener(server.stdout.readline().strip())
    server.terminate()
    assert server.wait(60) in (0, 143)
    server.stdout.close()


def test_only_the_one_with_the_token_opens_the_page(page: Opener) -> None:
    with page() as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert b"gradio" in answer.read()
    assert "connect-src 'self'" in policy
    host = page.url.removeprefix("http://").strip("/")
    for headers in ({"Cookie": ""}, {"Cookie": page.cookie + "x"}, {"Host": "evil.org"}, {"Origin": "http://evil.org"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            page(**headers)
    with page(Origin=f"http://{host}") as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="403"):  # the redirection leads to the address without the token
        page(f"?token={page.token}", Cookie="")


def test_a_merge_through_the_page(page: Opener, tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    with page("config") as answer:
        config = json.load(answer)
    buttons = {d["api_name"]: d["id"] for d in config["dependencies"]}
    assert {d["api_visibility"] for d in config["dependencies"]} == {"private"}
    form = [str(family.base), "\n".join(map(str, family.experts)), "auto", 1, 0, "", ""]
    assert "auto: actmat_ridge" in page.click(buttons["show_plan"], *form)[0]
    said, _, frame, report, out = page.click(buttons["show_merge"], str(family.out), *form)
    assert out == str(family.out)
    assert "finished in" in said
    assert frame["visible"]
    assert "&lt;title&gt;" in report
    assert 'sandbox="allow-scripts"' in report
    said, *_ = page.click(buttons["show_merge"], "", *form)
    assert "No output given" in said


SIGNED_IN = f"""
import gradio
from actmat.errors import MergeError
from actmat_app.jobs import Jobs
from actmat_app.limits import Limits
from actmat_app.page import SHOWN, build

class Recorded(Jobs):
    def push(self, user, out, repo, token, *, public):
        print(token)
        raise MergeError("No.")

gradio.routes.attach_oauth = lambda app: None  # it wants a Space around it
found = {{f.fn.__name__: f for f in build(Recorded(Limits()), []).fns.values() if f.fn is not None}}
assert "compare" not in found
assert {{found[n].concurrency_id for n in ("show_plan", "show_merge", "push_signed_in")}} == {{"job"}}
assert SHOWN["run_history"] is False
request, signed_in = gradio.Request(session_hash="v"), gradio.OAuthToken(token="{SECRET}", scope="", expires_at=0)
for token, who in (("", signed_in), ("own", signed_in), ("", None)):
    said, emptied = found["push_signed_in"].fn("out", "me/a", token, False, request, who)
    assert "No." in said and emptied == ""
"""


def test_a_visitor_who_signed_in_needs_no_token_and_the_field_is_emptied() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNED_IN], env={**os.environ, "OAUTH_CLIENT_ID": "id"}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [SECRET, "own", ""], done.stderr


def test_a_port_that_is_taken_is_refused(page: Opener) -> None:
    port = page.url.strip("/").rpartition(":")[2]
    done = subprocess.run([sys.executable, "-m", "actmat", "ui", "--port", port], capture_output=True, text=True)
    assert done.returncode == 1
    assert "another --port" in done.stderr


SENT = {  # method, address, bytes that are sent -> status; what the page asks for itself passes
    ("GET", "config", None): 200,
    ("GET", "gradio_api/deep_link?session_hash=me", None): 413,
    ("POST", "gradio_api/queue/join", 1000): 422,
    ("POST", "gradio_api/queue/join", 2_000_000): 413,
    ("POST", "gradio_api/upload", 1000): 413,
    ("POST", "gradio_api/component_server", 1000): 413,
    ("POST", "gradio_api/process_recording", 1000): 413,
}


def test_a_page_for_visitors_stores_nothing_that_is_sent(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    code = f"from actmat_app.serving import launch; launch(server_name='127.0.0.1', server_port={port}, quiet=True)"
    env = {**os.environ, "GRADIO_TEMP_DIR": str(tmp_path), "GRADIO_ANALYTICS_ENABLED": "False"}
    server = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL)
    try:
        for request, status in SENT.items():
            assert _status(port, *request) == status, request
    finally:
        server.terminate()
        server.wait(60)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def _status(port: int, method: str, address: str, size: int | None) -> int:
    """Status of the answer of a server that may be starting, 413 if it closes the connection."""
    body = None if size is None else b"{" + bytes(size)
    for _ in range(100):
        sent = urllib.request.Request(f"http://127.0.0.1:{port}/{address}", body, method=method)
        try:
            with urllib.request.urlopen(sent, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                return 413
            time.sleep(0.5)
    raise AssertionError("the page does not start")
