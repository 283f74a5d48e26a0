"""A headless Chromium, where one is installed: run a function against a page and read what it returns.

The page is loaded in a frame of a chosen width, so that its own policy on scripts stays in force while the probe, a
script of the frame's parent, reads and clicks. Nothing but the browser itself is needed.
"""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RESULT = re.compile(r'<pre id="result">(.*?)</pre>', re.DOTALL)
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><title>probe</title>
<iframe id="frame" style="width:{width}px;height:900px;border:0" src="page.html"></iframe><pre id="result"></pre>
<script>
const frame = document.getElementById("frame");
frame.addEventListener("load", async () => {{
  const [window, document] = [frame.contentWindow, frame.contentDocument];
  const all = (css) => [...document.querySelectorAll(css)];
  const type = (input, value) => {{
    input.value = value;
    input.dispatchEvent(new window.Event(input.tagName === "SELECT" ? "change" : "input", {{ bubbles: true }}));
  }};
  let found;
  try {{ found = await (async () => {{ {probe} }})(); }} catch (error) {{ found = {{ failed: String(error.stack) }}; }}
  globalThis.document.getElementById("result").textContent = JSON.stringify(found);
}});
</script>
"""


@dataclass(frozen=True)
class Seen:
    """What a probe returned, and what the browser's console said."""

    found: Any
    console: list[str]


@cache
def browser() -> str | None:
    """Path of an installed Chromium or Chrome."""
    return next((place for name in NAMES if (place := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    browser() is None, reason=f"no browser here: none of {', '.join(NAMES)} is installed"
)


def look(page: str, probe: str, folder: Path, *, width: int = 1200) -> Seen:
    """Open a page in a frame of `width` pixels and run the body of a JavaScript function on it.

    In the probe, `window` and `document` are those of the page, `all(css)` gives a list of elements, `type(input,
    value)` fills a field as a user does.
    """
    place = browser()
    (folder / "page.html").write_text(page, encoding="utf-8", errors="replace")
    (folder / "harness.html").write_text(HARNESS.format(width=width, probe=probe), encoding="utf-8")
    command = [
        place, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom", (folder / "harness.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    result = RESULT.search(done.stdout)
    assert result is not None, f"the browser gave no page:\n{done.stderr[-3000:]}"
    assert result[1], f"the probe did not end:\n{done.stderr[-3000:]}"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(json.loads(html.unescape(result[1])), console)
