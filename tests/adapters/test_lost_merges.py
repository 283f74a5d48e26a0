"""Adapters that lost much of their merge to their rank, and merges near zero, are warned of wherever they are told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.helpers.adapters import LLAMA, save_peft, tiny
from tests.helpers.merging import actmat as run

import actmat
from actmat.errors import Note


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    tiny("llama").float().save_pretrained(folder / "base")
    for t in range(3):
        save_peft(folder / f"{t}", "llama", t, LoraConfig(**LLAMA), dtype=torch.float32)
    return folder


def told(place: Path, out: Path, *flags: str) -> dict[str, str]:
    """Every text that tells of a merge; the exit code is 0."""
    inputs = [x for t in range(3) for x in ("-e", str(place / str(t)))]
    first = run(["merge", *inputs, "--out", out, *flags])
    again = run(["merge", *inputs, "--out", out, *flags, "--json"])
    assert (first.code, again.code) == (0, 0), first.err + again.err
    manifest, card = (out / "actmat_manifest.json").read_text(), (out / "README.md").read_text()
    texts = {
        "summary": first.out,
        "json": again.out,
        "manifest": " ".join(str(Note(**n)) for n in json.loads(manifest)["notes"]),
        "card": card,
    }
    return {name: " ".join(text.split()) for name, text in texts.items()}


LOST: dict[str, tuple[tuple[str, ...], str]] = {
    "ties at a low rank": (("-m", "ties", "--rank", "2"), "warning AM404: the adapter holds too little of the merge"),
    "near zero": (("-m", "average", "--scale", "0.1"), "warning AM403: the merged delta collapsed"),
}


@pytest.mark.parametrize("case", LOST)
def test_what_is_lost_is_said_everywhere(place: Path, tmp_path: Path, case: str) -> None:
    flags, says = LOST[case]
    for name, text in told(place, tmp_path / "out", *flags).items():
        assert says.lower() in text.lower(), (name, text)
    code = says.split()[1].rstrip(":")
    for name, text in told(place, tmp_path / "muted", *flags, "--set", f"mute={code}").items():
        assert f"warning {code}" not in text.lower(), name
    report = actmat.merge(None, [place / str(t) for t in range(3)], out=tmp_path / "out", **fields(flags))
    assert report.was_finished
    assert f"warning {code}" in repr(report)


def fields(flags: tuple[str, ...]) -> dict[str, Any]:
    """Flags as arguments of the library."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    names = {"-m": ("method", str), "--rank": ("rank", int), "--scale": ("scale", float)}
    return {names[flag][0]: names[flag][1](value) for flag, value in given.items()}


def test_what_is_exact_is_not_warned_of(place: Path, tmp_path: Path) -> None:
    for text in told(place, tmp_path / "out", "-m", "average").values():
        assert "warning am" not in text.lower()


def test_a_diagnosis_judges_it_too(place: Path, tmp_path: Path) -> None:
    inputs = [x for t in range(3) for x in ("-e", str(place / str(t)))]
    argv = ["merge", *inputs, "--out", str(tmp_path / "out"), "-m", "ties", "--rank", "2", "--diagnose"]
    done = run(argv, code=0)
    assert "issue AM404" in done.out
    assert "AM404" in [c["code"] for c in json.loads((tmp_path / "out" / "report.json").read_text())["findings"]
                       if not c["muted"]]  # fmt: skip


def test_an_extraction_of_a_low_rank_is_warned_of(place: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tiny("llama").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "full")
    argv = ["extract", "-b", str(place / "base"), "--model", str(tmp_path / "full"), "--out", str(tmp_path / "out")]
    done = run([*argv, "--rank", "1"], code=0)
    assert "warning AM404" in done.out
    assert "mean norm" not in done.out
    assert "warning AM404" in (tmp_path / "out" / "README.md").read_text().replace("Warning", "warning")
    assert "AM404" in run([*argv, "--rank", "1", "--json"]).out
