"""Habits of mergekit's command line get an error that names ours; misspelt parameters are told at the top."""

import pytest
from typer.testing import CliRunner

from actmat.cli.main import app


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["outdir"], "(outdir). Name the output with --out OUT"),
        (["--cuda"], "For GPUs use --device cuda"),
    ],
)
def test_arguments_of_mergekit_are_answered(more: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["merge", "mergekit.yml", *more])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("\u2502", " ").split())
