"""`actmat inspect --history`: merges by their manifests, experts and files by their content, changes between two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.docs_fixture import write_models
from tests.helpers.merging import actmat

from actmat.errors import CheckpointError
from actmat.extras.pages.history import changes_between, find_merges, made_by


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three merges: two of math and code, one of math and the first of them; and a merge of adapters."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)

    def merged(out: str, method: str, *experts: str, base: tuple[str, ...] = ("-b", "base")) -> None:
        words = [w for e in experts for w in ("-e", str(folder / e))]
        inputs = [str(folder / w) if w == "base" else w for w in base]
        done = actmat(["merge", *inputs, *words, "-m", method, "--out", str(folder / out), "-q"])
        assert done.code == 0, done.err

    merged("merges/ties", "ties", "experts/math", "experts/code")
    merged("merges/deep/average", "average", "experts/math", "experts/code")
    merged("merges/second", "average", "experts/math", "merges/ties")
    merged("merges/adapter", "average", "adapters/math", "adapters/code", base=())
    return folder


def listed(place: Path, *arguments: object, code: int = 0) -> list[str]:
    """Names of the merges that the command tells of."""
    done = actmat(["inspect", "--history", str(place / "merges"), *map(str, arguments), "--json"])
    assert done.code == code, done.err
    data = json.loads(done.out)
    assert data["schema"] == "actmat.history/1"
    return sorted(Path(m["place"]).name for m in data["merges"])


def test_all_merges_are_found_in_the_order_of_their_end(place: Path) -> None:
    found = find_merges([place / "merges", place / "merges" / "deep"])
    assert [m.place.name for m in found.merges].count("average") == 1
    assert [m.finished for m in found.merges] == sorted(m.finished for m in found.merges)
    assert listed(place) == ["adapter", "average", "second", "ties"]
    text = actmat(["inspect", "--history", str(place / "merges")]).out
    assert "math, code" in " ".join(text.split())
    assert actmat(["inspect", "--history", str(place / "merges"), "-q"]).out == ""


def test_an_expert_is_known_by_name_place_hash_and_content(place: Path, tmp_path: Path) -> None:
    assert listed(place, "--contains", "code") == ["adapter", "average", "ties"]
    assert listed(place, "--contains", place / "experts" / "code") == ["average", "ties"]
    content = next(m for m in find_merges([place / "merges"]).merges if m.place.name == "ties").experts[1]["content"]
    assert listed(place, "--contains", content[:10]) == ["average", "ties"]
    assert listed(place, "--contains", content[:4], code=1) == []
    moved = shutil.copytree(place / "merges" / "ties", tmp_path / "elsewhere")
    assert listed(place, "--contains", moved) == ["second"]
    assert listed(place, "--contains", "nobody", code=1) == []


def test_a_file_is_known_by_what_is_in_it(place: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "x.safetensors"
    shutil.copy(place / "merges" / "ties" / "model.safetensors", renamed)
    assert listed(place, "--made", renamed) == ["ties"]
    assert listed(place, "--made", place / "merges" / "second") == ["second"]
    assert listed(place, "--made", place / "experts" / "math", code=1) == []
    assert listed(place, "--made", place / "merges" / "adapter") == ["adapter"]
    card = place / "merges" / "ties" / "README.md"
    assert "ties" in listed(place, "--made", card)
    done = actmat(["inspect", "--history", str(place / "merges"), "--made", str(renamed)])
    assert "method: ties" in done.out
    data = bytearray(renamed.read_bytes())
    data[-1] ^= 1
    renamed.write_bytes(data)
    assert listed(place, "--made", renamed, code=1) == []


def test_what_changed_between_two(place: Path) -> None:
    merges = {m.place.name: m for m in find_merges([place / "merges"]).merges}
    changes = changes_between(merges["ties"], merges["second"])
    assert changes.recipe == {"method": ("ties", "average")}
    assert (changes.added, changes.removed, changes.changed) == (("ties",), ("code",), ())
    assert changes.tensors[1:] == (21, 0)
    same = changes_between(merges["ties"], merges["ties"])
    assert (same.recipe, same.tensors) == ({}, (0, 21, 0))
    done = actmat(["inspect", "--history", str(merges["ties"].place), str(merges["average"].place)])
    assert "method: ties -> average" in done.out
    assert "15 of 21 tensors differ" in done.out
    data = json.loads(
        actmat(["inspect", "--history", str(merges["ties"].place), str(merges["average"].place), "--json"]).out
    )
    assert data["changes"]["tensors"] == {"differing": 15, "common": 21, "only_in_one": 0}


def test_damaged_manifests_are_told_and_missing_folders_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "actmat_manifest.json").write_text("{")
    done = actmat(["inspect", "--history", str(tmp_path), str(place / "merges")])
    assert done.code == 0
    assert "not read" in done.out
    with pytest.raises(CheckpointError, match="nowhere"):
        find_merges([tmp_path / "nowhere"])
    with pytest.raises(CheckpointError, match="does not exist"):
        made_by([], tmp_path / "nothing")
    both: list[Any] = ["inspect", "--history", str(place), "--contains", "a", "--made", "b"]
    assert actmat(both).code == 2
