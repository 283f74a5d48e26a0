"""The page itself, where Gradio is installed: who may open it; driven in Chromium, where playwright is installed."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.app.conftest import SECRET, World
from tests.checkpoints.test_gguf import write_gguf
from tests.helpers.browser import browser
from tests.helpers.docs_fixture import LAYER, save_image_lora
from tests.helpers.family import TEXTS
from tests.helpers.repository import ROOT

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


@pytest.fixture(scope="module")
def page(world: World, family: Path) -> Iterator[Opener]:
    assert "\nactmat ui\n" in (ROOT / "docs" / "start.md").read_text()
    command = [sys.executable, "-m", "actmat", "ui", "--no-browser", "--quiet"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=family)
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


FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
WIDTHS = (1280, 390)
"""Of a laptop and a telephone, in pixels."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    driving = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    place = browser()
    if place is None:
        pytest.skip("no Chromium is installed")
    with driving.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=place, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def screen(page: Opener, chromium: Any) -> Iterator[Any]:
    """The page in a browser whose console stays silent."""
    screen, said = chromium.new_page(viewport={"width": WIDTHS[0], "height": 900}), []
    screen.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    screen.set_default_timeout(200_000)
    screen.goto(f"{page.url}?token={page.token}")
    yield screen
    assert not said
    screen.close()


def places(screen: Any) -> Any:
    """The fields of the experts that are shown."""
    return screen.get_by_role("combobox", name="Expert", exact=True)


def fill(screen: Any, experts: Sequence[tuple[str, str]], **fields: Any) -> None:
    """Fill in a row per expert, its place and its prompts, and fields by their labels."""
    for number, (place, prompts) in enumerate(experts):
        if place:
            places(screen).nth(number).fill(place)
        screen.get_by_label("Prompts").nth(number).fill(prompts)
    for label, text in fields.items():
        role = "combobox" if label == "Base" else "textbox"
        screen.get_by_role(role, name=label, exact=True).fill(str(text))


def press(screen: Any, button: str, text: str) -> str:
    """Press a button, wait for a text in the result, and return the result."""
    screen.get_by_role("button", name=button, exact=True).click()
    shown = screen.locator("#am-shown")
    shown.get_by_text(text).first.wait_for()
    return str(shown.inner_text())


def open_tab(screen: Any, name: str, **fields: str) -> None:
    """Open a tab below the result and fill in its fields, by the first word of their labels."""
    screen.get_by_role("tab", name=name).click()
    for label, text in fields.items():
        screen.get_by_role("textbox", name=re.compile(rf"^{label}\b")).fill(text)


SCROLLING = """[...document.querySelectorAll('html, .am, .am table')].filter(e => e.scrollWidth > e.clientWidth)
               .map(e => `${e.scrollWidth} > ${e.clientWidth}: ${e.outerHTML.slice(0, 300)}`)"""


def clipped(screen: Any) -> list[str]:
    """Parts that scroll sideways, at any of `WIDTHS`: the page and tables."""
    wide = []
    for width in WIDTHS:
        screen.set_viewport_size({"width": width, "height": 900})
        wide += screen.evaluate(SCROLLING)
    return wide


def test_adapters_are_planned_merged_by_prompts_tried_and_pushed(
    screen: Any, world: World, family: Path, tmp_path: Path
) -> None:
    rows = [(f"{name}={family}/adapters/{name}", f"{family}/{name}.jsonl") for name in TEXTS]
    fill(screen, [("nobody", ""), rows[0]], Base=family / "base", Output=tmp_path / "merged")
    screen.get_by_role("button", name="Add an expert").click()
    places(screen).nth(2).fill(rows[1][0])
    screen.get_by_label("Prompts").nth(2).fill("x = 1\nwhile x")
    screen.get_by_role("button", name="Remove").first.click()
    places(screen).nth(2).wait_for(state="hidden")
    assert [places(screen).nth(n).input_value() for n in range(2)] == [place for place, _ in rows]
    screen.get_by_label("Adapter").check()
    assert "code: 2 inputs measured" in press(screen, "Plan", "inputs measured")
    said = press(screen, "Merge", "finished in")
    assert said.index("answers") < said.index("finished in") < said.index("Notes")
    open_tab(screen, "Try a prompt", Prompt="w3 w4 w5")
    screen.get_by_role("button", name="Ask").click()
    screen.locator(".am-answers").wait_for()
    assert screen.locator(".am-answers b").all_inner_texts() == ["the merge", *TEXTS, "the base"]
    open_tab(screen, "Copy code")
    screen.get_by_text("PeftModel.from_pretrained").wait_for()
    open_tab(screen, "Push", Repository="me/merged", Token=SECRET)
    screen.get_by_role("button", name="Push", exact=True).click()
    screen.get_by_text("to me/merged (private)").wait_for()
    assert world[0].branches["me/merged", "main"]
    assert screen.get_by_role("textbox", name="Token").input_value() == ""
    assert clipped(screen) == []
    assert (tmp_path / "merged" / "adapter_config.json").is_file()


def test_a_model_becomes_a_gguf_file(screen: Any, tmp_path: Path) -> None:
    base, *experts = (str(write_gguf(tmp_path / f"{n}.gguf", "F16", seed=n)) for n in range(3))
    fill(screen, [(expert, "") for expert in experts], Base=base, Output=tmp_path / "merged")
    press(screen, "Merge", "finished in")
    open_tab(screen, "GGUF", File=f"{tmp_path}/file.gguf")
    write = screen.get_by_role("button", name="Write")
    write.click()
    screen.get_by_text("convert the base with llama.cpp").wait_for()
    open_tab(screen, "GGUF", GGUF=base)
    write.click()
    screen.get_by_text("15 BF16").wait_for()
    assert (tmp_path / "file.gguf").is_file()


def test_files_of_an_image_model_become_one_file(screen: Any, tmp_path: Path) -> None:
    files = [save_image_lora(tmp_path / f"{name}.safetensors", value) for name, value in (("a", 1.0), ("b", 2.0))]
    fill(screen, [(str(file), "") for file in files], Output=tmp_path / "merged")
    screen.get_by_label("Single file").check()
    assert "Is it good?" not in press(screen, "Merge", "finished in")
    screen.get_by_text("ComfyUI/models/loras/").wait_for()
    assert screen.get_by_role("tab").all_inner_texts() == ["Copy code"]
    assert float(load_file(tmp_path / "merged.safetensors")[f"{LAYER}.alpha"]) > 0
    assert clipped(screen) == []


def test_a_merge_stops_and_errors_say_how_to_go_on(screen: Any, family: Path, tmp_path: Path) -> None:
    experts = [(f"{family}/adapters/{name}", f"{family}/{name}.jsonl") for name in TEXTS]
    places(screen).first.click()
    screen.get_by_role("option", name="adapters/math").click()
    fill(screen, [("", experts[0][1]), experts[1]], Base="base")
    assert "Fix: fill in the field 'Output'" in press(screen, "Merge", "No output given")
    fill(screen, (), Output=tmp_path / "merged")
    for _ in range(2):  # as soon as a result is shown, the same button works again
        press(screen, "Merge", "starting")
        assert "finished" not in press(screen, "Stop", "Stopped.")
    assert not (tmp_path / "merged").exists()
    press(screen, "Merge", "finished in")


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
page = build(Recorded(Limits()), [])
clicked = {{page.blocks[f.targets[0][0]].value: f for f in page.fns.values() if f.targets[0][1] == "click"}}
assert {{*clicked}} == {{"Plan", "Merge", "Stop", "Push", "Add an expert", "Remove",
                        "Sign in with Hugging Face"}}
assert {{name for name, f in clicked.items() if f.concurrency_id == "job"}} == {{"Plan", "Merge", "Push"}}
assert SHOWN["run_history"] is False
assert {{b.label for b in page.blocks.values() if isinstance(b, gradio.Dropdown)}} == {{"Method"}}
request, signed_in = gradio.Request(session_hash="v"), gradio.OAuthToken(token="{SECRET}", scope="", expires_at=0)
for token, who in (("", signed_in), ("own", signed_in), ("", None)):
    *_, (_, ended, _) = clicked["Push"].fn(request, who, "out", "me/a", token, False)
    assert "No." in ended["html"]
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
