"""Habits of mergekit's command line get an error that names ours; misspelt parameters are told at the top."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.docs_fixture import write_models
from typer.testing import CliRunner

from actmat.cli.main import app

CONFIG = """merge_method: linear
models:
  - {{model: {0}/experts/math, parameters: {{wieght: 2, weight: 0.5}}}}
  - {{model: {0}/experts/code, parameters: {{weight: 0.5}}}}
"""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["outdir"], "unexpected extra arguments (outdir); name the output with --out OUT"),
        (["--cuda"], "For GPUs use --device cuda"),
    ],
)
def test_arguments_of_mergekit_are_answered(more: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["merge", "mergekit.yml", *more])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("\u2502", " ").split())


def test_a_misspelt_parameter_is_a_warning_before_the_tensors(tmp_path: Path) -> None:
    write_models(tmp_path)
    (tmp_path / "mergekit.yml").write_text(CONFIG.format(tmp_path))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "mergekit.yml")])
    first = " ".join(result.output.split("tensors  action")[0].split())
    assert "warning: 'models.0.parameters.wieght' is ignored, as mergekit ignores it. Did you mean 'weight'?" in first
    assert "wieght" not in result.output.split("tensors  action")[1]
