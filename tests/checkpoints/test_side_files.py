"""Files that go with an output: by rule, deeper ones too, and the others named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_folder

import actmat
from actmat.checkpoints.resolve import open_model
from actmat.checkpoints.side_files import LARGEST, MOST_IN_FOLDER, sort_side_files
from actmat.errors import CheckpointError
from actmat.extras.remote.objects import ObjectStore

_KEPT = """
config.json tekken.json LICENSE NOTICE.txt vocab.bpe spiece.model tokenizer.json.gz custom.yaml modeling_x.py
additional_chat_templates/tool.jinja custom_generate/generate.py custom_generate/requirements.txt 1_Pooling/config.json
assets/words/list.txt
"""
KEPT = _KEPT.split()
LEFT_OUT = {
    "pytorch_model.bin": "weights",
    "optimizer.pt": "pickle",
    "README.md": "anew",
    "actmat_manifest.json": "anew",
    "adapter_config.json": "adapter",
    "trainer_state.json": "training",
    "eval_results.json": "training",
    "events.out.tfevents.17.host": "training",
    "hf_quant_config.json": "codes",
    "quantize_config.json": "codes",
    "logo.png": "image",
    "paper.pdf": "image",
    ".gitattributes": "hidden",
    "huge.json": str(LARGEST),
}
FOLDERS = {
    "onnx": (["model.onnx", "config.json"], "model.onnx"),
    "original": (["consolidated.00.pth", "params.json"], "consolidated.00.pth"),
    "checkpoint-100": (["model.safetensors", "trainer_state.json"], "model.safetensors"),
    ".cache": (["a.json"], "hidden"),
    "runs": (["x.json"], "training"),
    "pages": ([f"{n}.txt" for n in range(MOST_IN_FOLDER + 1)], str(MOST_IN_FOLDER + 1)),
}


def test_the_rule() -> None:
    sizes = dict.fromkeys([*KEPT, *LEFT_OUT, "model.safetensors", "model.safetensors.index.json"], 10)
    sizes["huge.json"] = LARGEST + 1
    sizes |= {f"{top}/{name}": 10 for top, (names, _) in FOLDERS.items() for name in names}
    found = sort_side_files(sizes, ["model.safetensors"])
    assert list(found.kept) == sorted(KEPT)
    wanted = LEFT_OUT | {f"{top}/": why for top, (_, why) in FOLDERS.items()}
    assert found.left_out.keys() == wanted.keys()
    assert {n: why for n, why in found.left_out.items() if wanted[n] not in why.text} == {}


def model(folder: Path, seed: int) -> Path:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return save_folder(folder, {"fc.weight": weight}, {"model_type": "bert"})


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)


@pytest.fixture
def sentences(tmp_path: Path) -> tuple[Path, Path]:
    """A base like those of sentence-transformers, and an expert with other files."""
    base, expert = model(tmp_path / "base", 0), model(tmp_path / "expert", 1)
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    write(base, modules_json=json.dumps(modules), LICENSE="l", tekken_json="{}", trainer_state_json="{}")
    write(base, **{"1_Pooling__config_json": '{"dim": 4}', "2_Dense__config_json": "{}", "onnx__config_json": "{}"})
    save_file({"w": torch.ones(2)}, base / "2_Dense" / "model.safetensors")
    (base / "onnx" / "model.onnx").write_bytes(b"")
    write(expert, tekken_json='{"expert": 1}', **{"1_Pooling__config_json": '{"dim": 5}', "sub__extra_json": "{}"})
    (expert / "optimizer.pt").write_bytes(b"")
    return base, expert


def test_an_output_has_all_that_its_loader_reads(sentences: tuple[Path, Path], tmp_path: Path) -> None:
    base, expert = sentences
    report = actmat.merge(base, [expert], out=tmp_path / "out", threads=1, durable=False)
    for name in ("modules.json", "LICENSE", "1_Pooling/config.json", "2_Dense/config.json"):
        assert (report.out / name).read_bytes() == (base / name).read_bytes()
    assert (report.out / "tekken.json").read_text() == '{"expert": 1}'
    assert not (report.out / "onnx").exists()
    output = report.manifest["output"]
    assert "1_Pooling/config.json" in output["copied_files"]
    assert output["left_out"].keys() == {"trainer_state.json", "onnx/"}
    (note,) = [n for n in map(str, report.plan.notes) if n.startswith("not copied")]
    assert "trainer_state.json (training record)" in note
    assert actmat.verify(report.out).ok
    (report.out / "1_Pooling" / "config.json").write_text("{}")
    (problem,) = actmat.verify(report.out).problems
    assert "1_Pooling/config.json" in problem


def test_the_expert_gives_all_but_what_goes_with_the_tensors(sentences: tuple[Path, Path], tmp_path: Path) -> None:
    base, expert = sentences
    report = actmat.merge(
        base, [{"path": str(expert), "name": "one"}], files_from="one", out=tmp_path / "out", threads=1, durable=False
    )
    assert (report.out / "tekken.json").read_text() == '{"expert": 1}'
    assert (report.out / "sub" / "extra.json").exists()
    assert (report.out / "1_Pooling" / "config.json").read_text() == '{"dim": 4}'  # a module of the base's model
    assert not (report.out / "LICENSE").exists()
    assert "optimizer.pt (one)" in report.manifest["output"]["left_out"]


def test_a_run_goes_on_though_files_in_folders_were_copied(
    sentences: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, expert = sentences
    with monkeypatch.context() as patch:
        patch.setattr("actmat.run.output.write_manifest", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            actmat.merge(base, [expert], out=tmp_path / "out", threads=1, durable=False)
    (partial,) = tmp_path.glob(".out.actmat-partial")
    assert (partial / "1_Pooling").is_dir()
    report = actmat.merge(base, [expert], out=tmp_path / "out", threads=1, durable=False)
    assert report.resumed == 2
    assert actmat.verify(report.out).ok


def test_links_are_refused_wherever_they_lie(sentences: tuple[Path, Path], tmp_path: Path) -> None:
    base, expert = sentences
    (tmp_path / "secret").write_text("s")
    (base / "1_Pooling" / "key.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"1_Pooling/key\.txt: is a link to"):
        actmat.plan(base, [expert])
    (base / "1_Pooling" / "key.txt").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (base / "linked").symlink_to(tmp_path / "elsewhere")
    with open_model(base) as opened:
        assert "linked/a.txt" not in opened.folder.side_files.kept


def test_a_damaged_table_of_modules_is_named(sentences: tuple[Path, Path]) -> None:
    base, _ = sentences
    (base / "modules.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="expected a list of modules"):
        open_model(base)


def test_folders_in_a_bucket_are_listed(sentences: tuple[Path, Path], tmp_path: Path) -> None:
    base, expert = sentences
    store = ObjectStore(f"file://{base}")
    assert {"1_Pooling/config.json", "2_Dense/model.safetensors"} <= store.below().keys()
    with pytest.raises(CheckpointError, match="several models is read from a local folder"):
        open_model(f"file://{base}")
    (base / "2_Dense" / "model.safetensors").unlink()
    with open_model(f"file://{base}") as opened:
        kept = opened.folder.side_files.kept
        folder = opened.folder.directory
        assert folder is not None
        assert "onnx/config.json" not in kept
        assert (folder / "2_Dense" / "config.json").read_bytes() == (base / "2_Dense" / "config.json").read_bytes()
        with open_model(base) as local:
            assert local.folder.side_files == opened.folder.side_files
    url = f"file://{tmp_path}/bucket"
    actmat.merge(base, [expert], out=url, threads=1, durable=False)
    assert (tmp_path / "bucket" / "1_Pooling" / "config.json").exists()
    assert actmat.verify(url).ok
