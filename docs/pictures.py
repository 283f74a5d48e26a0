"""Pictures of the report and of the page of `actmat ui`, taken by Chromium, narrow enough for a telephone.

`python -m docs.generate --pictures` writes docs/report.png and docs/ui.png; it needs chromium and Gradio.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from docs.markdown import ROOT
from tests.helpers.docs_fixture import DIGITS

import actmat

SIZE, DENSITY, COLORS = "560,1000", 2, 64


def take() -> None:
    """Take all pictures."""
    from actmat_app.jobs import Jobs
    from actmat_app.page import SHOWN, build
    from actmat_app.view import plan_html

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(DIGITS, "demo-output")
        base, *experts = "demo-output/base", "demo-output/experts/parity", "demo-output/experts/large"
        actmat.merge(base, experts, out="merged", diagnose=True)
        _shoot(Path("merged/report.html").absolute().as_uri(), "report.png")
        page = build(Jobs(), [])
        places = iter(experts)
        values = {"Base": base, "Output": "merged"}
        for block in page.blocks.values():
            label = str(getattr(block, "label", ""))
            if label == "Expert":
                block.value = next(places, "")
            elif label in values:
                block.value = values[label]
            elif getattr(block, "elem_id", None) == "am-shown":
                block.value = str(plan_html(actmat.plan(base, experts)))
        page.launch(prevent_thread_lock=True, quiet=True, **SHOWN)
        _shoot(page.local_url, "ui.png")
        page.close()


def _shoot(address: str, name: str) -> None:
    """Write the top of a page to a file of docs."""
    from PIL import Image

    picture = ROOT / "docs" / name
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=9000", f"--window-size={SIZE}"]
    flags += [f"--force-device-scale-factor={DENSITY}", f"--screenshot={picture}"]
    subprocess.run(["chromium", *flags, address], check=True, capture_output=True)
    Image.open(picture).convert("RGB").quantize(COLORS).save(picture, optimize=True)
