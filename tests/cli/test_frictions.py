"""Small things that new users meet: other names of options, long texts of libraries, notes that repeat what is said."""

from pathlib import Path

import pytest
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.merging import actmat

from actmat.errors import RecipeError
from actmat.extras.models.loading import LONGEST, in_brief
from actmat.methods import get_method


@pytest.mark.parametrize("spelling", ["normalise", "normalize"])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_normalizing_is_found_where_it_is(method: str, spelling: str) -> None:
    with pytest.raises(RecipeError, match="divided by their sum with --set normalize=true"):
        get_method(method).resolve_options({spelling: True})


def test_libraries_are_repeated_in_one_sentence(models: Path, tmp_path: Path) -> None:
    assert in_brief("Cannot do it.\nYou can try this. Or that.") == "Cannot do it"
    assert in_brief("one v1.2 file, and no more") == "one v1.2 file, and no more"
    assert len(in_brief("word " * 500)) <= LONGEST + 4
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (models / "base").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    edit_json(broken / "config.json", model_type="nonesuch")
    (tmp_path / "t.jsonl").write_text('{"text": "one"}\n')
    arguments = [str(broken), "--data", str(tmp_path / "t.jsonl"), "--set", "model_class=AutoModelForCausalLM"]
    done = actmat(["statistics", "collect", *arguments, "--out", tmp_path / "s"], code=1)
    assert "model type `nonesuch`" in done.err
    assert "pip install" not in done.err
    assert "pass another class (--set model_class" in done.words
