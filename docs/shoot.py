"""`python -m docs.shoot`: the pictures of `actmat ui` and of a report in the docs, taken in a headless Chromium.

Needs Chromium and playwright (`pip install playwright`). The models of `ui` are those that the pages' commands run on,
those of the report the experts of `actmat demo`; `python -m docs.shoot FOLDER` takes a `demo-output` that is in FOLDER.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.docs_fixture import write_models

HERE = Path(__file__).parent


COLOURS = 64
"""Colours that are kept of a page of text and bars."""


def shoot_report(folder: Path) -> None:
    """Merge the six experts of the demo by actmat, and photograph the upper half of the report."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    actmat = [sys.executable, "-m", "actmat"]
    if not (folder / "demo-output" / "experts").is_dir():
        subprocess.run([*actmat, "demo", "--quiet", "--method", "actmat"], cwd=folder, check=True)
    experts = (
        word
        for e in sorted((folder / "demo-output" / "experts").iterdir())
        for word in ("-e", f"demo-output/experts/{e.name}")
    )
    merge = [*actmat, "merge", "-b", "demo-output/base", *experts, "-m", "actmat", "--out", "my/actmat", "--diagnose"]
    subprocess.run([*merge, "--quiet", "--overwrite"], cwd=folder, check=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 1600})
        page.goto((folder / "my" / "actmat" / "report.html").absolute().as_uri())
        page.screenshot(path=HERE / "report.png")
        browser.close()
    with Image.open(HERE / "report.png") as whole:
        whole.convert("RGB").quantize(COLOURS).save(HERE / "report.png", optimize=True)


def shoot_ui(folder: Path) -> None:
    """Fill in the form, merge, and photograph the page."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "actmat", "ui", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    with contextlib.ExitStack() as stack:
        stack.callback(server.wait)
        stack.callback(server.terminate)
        started = stack.enter_context(sync_playwright())
        assert server.stdout is not None
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1060})
        page.goto(server.stdout.readline().strip())
        page.wait_for_selector("#method option", state="attached")
        for field, value in {"#base": "base", "[aria-label='Expert 1']": "experts/math"}.items():
            page.fill(field, value)
            page.press(field, "Tab")
        page.fill("[aria-label='Expert 2']", "experts/code")
        page.press("[aria-label='Expert 2']", "Tab")
        page.wait_for_selector("#status .good")
        page.select_option("#grouping", "kind")
        page.wait_for_selector("[aria-label='scale of mlp']")
        page.fill("[aria-label='scale of mlp']", "0.5")
        page.press("[aria-label='scale of mlp']", "Tab")
        page.fill("#out", "merged")
        page.press("#out", "Tab")
        page.locator("#command", has_text="--out merged").wait_for()
        page.click("#merge")
        page.wait_for_selector("#job code", timeout=60_000)
        page.evaluate("document.querySelector('#seen').scrollTo(0, 0); window.scrollTo(0, 0)")
        page.screenshot(path=HERE / "ui.png")
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write_models(Path(made))
        shoot_ui(Path(made))
        shoot_report(Path(sys.argv[1] if len(sys.argv) > 1 else made))
