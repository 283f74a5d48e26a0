"""Wrong inputs, recipes or places: one message with every problem, exit 1, nothing written."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.merging import EMBEDDING, NORM, Q0, UP0, Family, Outcome, actmat, hidden, save_checkpoint


def refused(family: Family, *flags: str, says: tuple[str, ...]) -> Outcome:
    outcome = actmat(family.argv(*flags), code=1)
    assert outcome.err.count("actmat: ") == 1, "one message"
    assert "Traceback" not in outcome.err
    for words in says:
        assert words in outcome.err, f"{words!r} not in:\n{outcome.err}"
    assert not family.out.exists()
    assert hidden(family.root) == []
    return outcome


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def rename_expert(family: Family) -> None:
    family.experts[0].rename(family.root / "expert0-moved")


def added(**tensors: torch.Tensor) -> Callable[[Family], None]:
    """Tensors of the second expert, by the endings of their names."""
    named = {f"{Q0.removesuffix('weight')}{ending}": tensor for ending, tensor in tensors.items()}
    return lambda family: family.change(family.experts[1], lambda t: t.update(named))


FILES: dict[str, tuple[Callable[[Family], object], tuple[str, ...]]] = {
    "expert missing": (rename_expert, ("has no 'expert0'", "Did you mean")),
    "base and expert missing": (
        lambda f: (rename_expert(f), f.base.rename(f.root / "elsewhere")),
        ("has no 'base'", "has no 'expert0'", "2 problems"),
    ),
    "not a checkpoint": (lambda f: weights(f.experts[0]).unlink(), ("expert0",)),
    "no tensors": (
        lambda f: weights(save_checkpoint(f.experts[0], {})) and None,
        ("expert 'expert0'", "holds no tensors"),
    ),
    "integers": (added(weight=torch.zeros(8, 8, dtype=torch.int32)), (Q0, "tensors look quantized (int32 weights)")),
    "gptq": (added(qweight=torch.zeros(2, 8, dtype=torch.int32)), ("expert 'expert1'", "GPTQ", "qweight")),
    "truncated": (lambda f: os.truncate(weights(f.experts[0]), 500), ("model.safetensors", "interrupted download")),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_cannot_be_used(family: Family, case: str) -> None:
    spoil, says = FILES[case]
    spoil(family)
    refused(family, says=says)


def test_problems_of_every_kind_in_one_message(family: Family) -> None:
    family.out.mkdir()
    (family.out / "mine.txt").write_text("precious")
    rename_expert(family)
    weights(family.experts[1]).write_bytes(b"tiny")
    outcome = actmat(family.argv("--method", "tie", "--device", "gpu"), code=1)
    for words in (
        "has no 'expert0'",
        "expected a safetensors file",
        "Did you mean 'ties'?",
        "got 'gpu'",
        "is not empty",
    ):
        assert words in outcome.err
    assert [p.name for p in family.out.iterdir()] == ["mine.txt"]


def test_tensors_that_do_not_fit_are_all_named(family: Family) -> None:
    family.change(family.experts[0], lambda t: t.pop(Q0))
    family.change(family.experts[1], lambda t: t.update({UP0: torch.zeros(12, 9), NORM: torch.zeros(7)}))
    family.change(family.experts[1], lambda t: t.update({EMBEDDING: torch.zeros(23, 8)}))
    outcome = refused(
        family,
        says=(
            "4 problems",
            f"'{Q0}' 8x8 is missing in expert 'expert0'",
            f"'{UP0}' is 12x8 in the base and 12x9 in expert 'expert1'",
            f"'{NORM}' is 8 in the base and 7",
            "another vocabulary (23 tokens instead of 20",
            "--keep",
        ),
    )
    assert outcome.err.count("another vocabulary") == 1


def spoil(family: Family) -> None:
    for folder, value in zip(family.experts, (torch.nan, torch.inf), strict=True):
        for name, row in ((Q0, 1), (NORM, 2)):
            family.change(folder, lambda t, n=name, r=row, v=value: t[n][r].fill_(v))


def test_values_that_are_not_finite_are_all_named(family: Family) -> None:
    spoil(family)
    says = tuple(
        f"tensor '{name}' of expert '{expert}' has {count}"
        for name, count in ((Q0, "8 values"), (NORM, "1 value"))
        for expert in ("expert0", "expert1")
    )
    refused(family, says=(*says, "--keep NAME"))
    actmat(family.argv("--keep", Q0, "--keep", NORM), code=0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--method", "ties", "--option", "densty=0.3"), ("no option 'densty'", "Did you mean 'density'?")),
        (("--method", "actmat", "--option", "rtol=-1"), ("'rtol' must lie in",)),
        (("--option", "density=0.3"), ("none is named", "found density")),
        (("--option", "rtol"), ("name=value",)),
        (("--option", "rtol={"), ("cannot be read",)),
        (("--option", "rtol=1e-6", "--option", "rtol=1e-5"), ("given twice",)),
        (("--weight", "1"), ("2 experts and 1 weights",)),
        (("--scale", "nan"), ("scale", "finite")),
        (("--dtype", "int8"), ("dtype",)),
        (("--keep", "no.such.*"), ("'no.such.*' matches no tensor",)),
        (("--keep", "re:("), ("keep",)),
        (("--set", "files_from=expert9"), ("files_from names 'expert9'",)),
        (("--set", "max_shard_size=big"), ("5GB",)),
        (("--max-memory", "1MB"), ("too little", "allow at least")),
        (("--threads", "0"), ("at least 1",)),
        (("--method", "fisher"), ("statistics",)),
        (("--device", "cuda:x"), ("got 'cuda:x'",)),
    ],
)
def test_flags_that_cannot_be_carried_out(family: Family, flags: tuple[str, ...], says: tuple[str, ...]) -> None:
    refused(family, *flags, says=says)


@pytest.mark.parametrize("place", ["base", "expert0", "base/inside", "."])
def test_an_output_on_an_input(family: Family, place: str) -> None:
    before = weights(family.base).read_bytes()
    outcome = actmat(family.argv("--overwrite", "--out", str(family.root / place)), code=1)
    assert "input of this merge" in outcome.err
    assert weights(family.base).read_bytes() == before


def test_an_output_below_a_file(family: Family) -> None:
    (family.root / "file").write_text("")
    refused(family, "--out", str(family.root / "file" / "out"), says=("is a file",))


def test_an_output_that_is_the_working_directory(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    family.out.mkdir()
    monkeypatch.chdir(family.out)
    actmat(family.argv("--out", "."), code=0)
    assert weights(family.out).is_file()
    assert hidden(family.root) == []
