"""The server of the page answers its own page on this machine, and nobody else."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import webbrowser
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.json_layouts import pinned
from tests.helpers.merging import actmat

from actmat.cli.catalogue import read_catalogue
from actmat.errors import OutputError
from actmat.extras.ui.server import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(list(read_catalogue().values())) as served:
        thread = threading.Thread(target=served.run)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def request(server: Server, method: str, path: str, **given: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; a header that is given as None is not sent."""
    body = given.pop("body", None)
    headers = {"Host": f"127.0.0.1:{server.port}", "X-Actmat-Token": server.token} | given.pop("headers", {})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    length = {} if body is None or "Content-Length" in headers else {"Content-Length": str(len(body))}
    for name, value in (headers | length).items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    connection.close()
    return found


def asked(server: Server, question: str, data: object = None) -> Any:
    body = json.dumps({} if data is None else data).encode()
    status, _, answer = request(server, "POST", f"/api/{question}", body=body)
    assert status == 200, answer
    return json.loads(answer)


def test_the_page_allows_only_its_own_script_style_and_origin(server: Server) -> None:
    status, headers, body = request(server, "GET", f"/?token={server.token}")
    policy = headers["content-security-policy"]
    assert status == 200
    assert b"<script>" in body
    assert b"/* script */" not in body
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["cache-control"] == "no-store"
    assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=wrong", "/?token=%C3%BC", "/pages/1?token=wrong"])
def test_a_page_needs_the_token(server: Server, path: str) -> None:
    status, _, body = request(server, "GET", path)
    assert status == 403
    assert server.token.encode() not in body


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Actmat-Token": None},
        {"X-Actmat-Token": "wrong"},
        {"Host": "evil.example"},
        {"Host": None},
        {"Host": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
def test_a_question_needs_token_host_and_origin(server: Server, headers: dict[str, str | None]) -> None:
    status, _, _ = request(server, "POST", "/api/start", body=b"{}", headers=headers)
    assert status == 403


def test_its_own_origin_is_allowed(server: Server) -> None:
    headers = {"Origin": f"http://localhost:{server.port}", "Host": f"localhost:{server.port}"}
    assert request(server, "POST", "/api/job", body=b"{}", headers=headers)[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/api/nonsense", b"{}", {}, 404),
        ("/api/__init__", b"{}", {}, 404),
        ("/api/start", b"{", {}, 400),
        ("/api/start", b"[1]", {}, 400),
        ("/api/start", b"[" * 100_000, {}, 400),
        ("/api/start", b"\xff", {}, 400),
        ("/api/start", b"", {"Content-Length": "-1"}, 413),
        ("/api/start", b"", {"Content-Length": "many"}, 413),
        ("/api/start", b"", {"Content-Length": "999999999999"}, 413),
    ],
)
def test_wrong_questions_are_refused(server: Server, path: str, body: bytes, headers: dict, status: int) -> None:
    assert request(server, "POST", path, body=body, headers=headers)[0] == status


@pytest.mark.parametrize("path", ["/pages/7", "/pages/../etc/passwd", "/pages/%2e%2e", "/etc/passwd", "/pages/%C2%B2"])
def test_no_other_file_is_served(server: Server, path: str) -> None:
    assert request(server, "GET", f"{path}?token={server.token}")[0] == 404


def test_start_lists_the_methods(server: Server) -> None:
    found = asked(server, "start")["answer"]
    assert {"actmat", "average", "ties"} <= {m["name"] for m in found["methods"]}


@pytest.mark.parametrize("data", [{}, {"form": 3}, {"form": {"recipe": 1}}, {"form": {"recipe": {}, "scales": []}}])
def test_a_senseless_form_is_an_answer_and_no_crash(server: Server, data: dict[str, Any]) -> None:
    found = asked(server, "plan", data)
    assert not found["ok"]
    assert found["headline"]


@pytest.mark.parametrize("question", ["folder", "save"])
def test_a_home_of_nobody_is_an_answer_and_no_crash(server: Server, question: str) -> None:
    form = {"recipe": {"base": "b", "experts": [{"path": "e"}]}, "settings": {}}
    found = asked(server, question, {"path": "~nobody-of-this-name/x", "form": form})
    assert not found["ok"]
    assert "nobody-of-this-name" in found["headline"]


def test_a_client_that_goes_away_leaves_no_traceback(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /api/start HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-Actmat-Token: {server.token}\r\n"
        connection.sendall(f"{head}Content-Length: {2 if number % 2 else 20}\r\n\r\n{{}}".encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        connection.close()
    assert asked(server, "start")["ok"], "it answers the next one"
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_named(server: Server) -> None:
    with pytest.raises(OutputError, match=rf"Port {server.port} cannot be used.*--port"):
        Server([], server.port)


@pytest.mark.parametrize(("flag", "lines"), [("--json", 5), ("--quiet", 1), ("--browser", 2)])
def test_the_command_prints_its_address(flag: str, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(Server, "run", lambda self: None)  # ends at once
    monkeypatch.setattr(webbrowser, "open", opened.append)
    done = actmat(["ui", flag, *([] if flag == "--browser" else ["--no-browser"])])
    assert (done.code, len(done.out.splitlines())) == (0, lines)
    if flag == "--json":
        found = pinned(json.loads(done.out), "ui")
        assert found["url"].startswith(f"http://127.0.0.1:{found['port']}/?token=")
    else:
        assert done.out.startswith("http://127.0.0.1:")
    assert bool(opened) == (flag == "--browser")
