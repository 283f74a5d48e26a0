"""An extracted adapter is an output as any other: manifest, verification, resuming, diagnosis, URLs, memory."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.adapters.test_extract import noise, save
from tests.helpers.merging import actmat as run

import actmat
from actmat.errors import MergeError
from actmat.report.manifest import read_manifest
from actmat.report.verify import verify

Q = "model.layers.0.self_attn.q_proj.weight"
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extracted")
    save("llama", folder / "base")
    for seed in (1, 2):
        save("llama", folder / f"model{seed}", noise(seed, of=lambda n: "norm" not in n))
    return folder


def merged(place: Path, out: Path | str, **fields: Any) -> actmat.MergeReport:
    given = {"to": "adapter", "rank": 3, "method": "average", "durable": False, "threads": 2} | fields
    return actmat.merge(place / "base", [place / "model1", place / "model2"], out=out, **given)


@pytest.fixture(scope="module")
def out(place: Path) -> Path:
    return Path(merged(place, place / "out").out)


def test_the_manifest_lists_layers_inputs_and_what_was_written(place: Path, out: Path) -> None:
    manifest = read_manifest(out)
    rows = {r["name"]: r for r in manifest["modules"]}
    assert manifest["kind"] == "adapter"
    assert (rows[Q]["kind"], rows[Q]["rank"], rows[Q]["method"]) == ("factored", 3, "average")
    assert rows[Q]["stats"]["relative_error"] == pytest.approx(
        rows[Q]["stats"]["error_norm"] / rows[Q]["stats"]["norm"]
    )
    assert rows["model.norm.weight"]["unchanged"]
    assert rows["model.norm.weight"]["outputs"] == []
    assert {t["name"] for t in manifest["tensors"]} == load_file(out / FILE).keys()
    assert manifest["base"]["hashes"].keys() == manifest["experts"][0]["hashes"].keys() == rows.keys()
    checked = verify(out)
    assert checked.ok
    assert set(checked.inputs) == {"base", "model1", "model2"}


def test_a_run_that_fails_before_tensors_are_left_out_keeps_all(
    place: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import actmat.run.output as finishing

    def fails(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    for name in ("model_card", "settled_plan"):  # after tensors are left out, and before
        with monkeypatch.context() as patch:
            patch.setattr(finishing, name, fails)
            with pytest.raises(KeyboardInterrupt):
                merged(place, tmp_path / "again")
    report = merged(place, tmp_path / "again")
    assert report.resumed == len(report.plan.items)
    assert (tmp_path / "again" / FILE).read_bytes() == (out / FILE).read_bytes()


def test_plans_say_what_is_written(place: Path) -> None:
    experts = [place / "model1", place / "model2"]
    plan = actmat.plan(place / "base", experts, to="adapter", rank=3, method="average")
    item = plan.by_name[Q]
    assert (item.write.kind, item.write.rank) == ("svd", 3)
    assert item.reason.endswith("factors of rank 3")
    model = actmat.plan(place / "base", experts, method="average").by_name[Q]
    assert item.cost.host_bytes > model.cost.host_bytes + 4 * item.numel
    flags = ["-b", place / "base", "-e", experts[0], "--to", "adapter", "--rank", "4"]
    words = run(["plan", *flags], code=0).words
    assert "extracted into an adapter" in words
    assert "factors of rank 4" in words


def test_a_diagnosis_goes_with_it(place: Path, tmp_path: Path) -> None:
    report = merged(place, tmp_path / "out", diagnose=True, method="actmat")
    assert report.diagnosis.source == "merge"
    assert any(m.name == Q for m in report.diagnosis.measures)
    assert verify(tmp_path / "out").ok
    run(["diagnose", tmp_path / "out", "--out", tmp_path / "page.html"], code=0)
    assert (tmp_path / "out" / "report.html").is_file()
    run(["extract", "-b", place / "base", "--model", place / "model1", "--rank", "2", "--plan"], code=0)


def test_an_output_at_a_url(place: Path, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = "memory://extracted/adapter"
    report = merged(place, url)
    assert report.out == url
    with fsspec.open(f"{url}/{FILE}", "rb") as file:
        assert file.read() == (out / FILE).read_bytes()
    assert verify(url).ok
    assert merged(place, url).was_finished
    assert not list(fsspec.filesystem("memory").glob("extracted/adapter/.*"))


def test_what_is_no_extraction_says_so(place: Path, tmp_path: Path) -> None:
    experts = [place / "model1"]
    fields: dict[str, Any] = {"to": "adapter", "rank": 2}
    for call, words in (
        (lambda: actmat.merge(place / "base", experts, **fields), "extracted into a folder"),
        (
            lambda: actmat.merge(place / "base", experts, out=tmp_path / "o", others="leave"),
            "but the output is a model",
        ),
    ):
        with pytest.raises(MergeError, match=words):
            call()
    assert not list(tmp_path.iterdir())
