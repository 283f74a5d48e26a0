"""The core works without `actmat/extras`, and another distribution adds what extras add, by entry points only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.merge_server import Server
from tests.helpers.merging import save_checkpoint
from tests.helpers.repository import ROOT

TOY = '''
import json
from pathlib import Path

import torch
import typer

from actmat.checkpoints.base import CheckpointHandle
from actmat.checkpoints.codecs.base import Codec
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.source import Format
from actmat.engine.executors.threads import ThreadExecutor
from actmat.experts.base import AdapterFamily
from actmat.experts.changes.base import Change, Content, Reader
from actmat.experts.changes.expert import FormedExpert
from actmat.experts.lora.adapter import Adapter
from actmat.methods import Merged, MergeMethod


def greet() -> None:
    """Say hello."""
    typer.echo("hello of the toy")


class HexCheckpoint(MemoryCheckpoint):
    """Tensors in JSON."""

    def __init__(self, source):
        self.source = source
        values = json.loads(source.fetch(names_of(source)[0]).read_text())
        super().__init__({n: torch.tensor(v) for n, v in values.items()}, location=source.location)

    def identity(self):
        return self.source.identity(names_of(self.source))

    def handle(self):
        return CheckpointHandle(self.source.address, "toytensors", self.location)


def names_of(source):
    return [n for n in source.weights if n.endswith(".toytensors")]


TOYTENSORS = Format("toytensors", ("*.toytensors",), lambda source: bool(names_of(source)), HexCheckpoint)


def find(spec, headers):
    Path("asked_codec").touch()


CODEC = Codec("toy", ("",), find)


class Ones(Change):
    """Ones on one tensor."""

    reads_base = False

    def __init__(self, target, shape, stored=()):
        self.target, self.shape, self.stored = target, shape, stored

    def misfit(self, shape):
        return ""

    def rows(self, tensors, base_PI, first, last):
        return torch.ones(last - first, self.shape[1])


def look(candidate):
    if "toy_adapter.json" in candidate.source.names:
        target = json.loads(candidate.source.fetch("toy_adapter.json").read_text())["tensor"]
        return Adapter.of_tensors(MemoryCheckpoint({target: torch.ones(1)}, location=candidate.source.location))


def fit(adapter, base):
    changes = [Ones(target, base.specs[target].shape) for target in adapter.weights.specs]
    return FormedExpert(adapter, base, Content(changes, {}, []))


FAMILY = AdapterFamily("toy", look, fit)


def read(specs, fields):
    (name,) = specs
    return Content([Ones("w", specs[name].shape, (name,))], {}, [])


READER = Reader("toy reader", lambda fields: fields.get("peft_type") == "TOY", read, "it is a toy")


class Executor(ThreadExecutor):
    """Threads that leave a trace."""

    def run(self, *arguments, **options):
        Path("ran_executor").touch()
        return super().run(*arguments, **options)


def first(deltas):
    return Merged(deltas[0])


FIRST = MergeMethod("toy_first", first, "elementwise")


'''

ENTRIES = """
[actmat.commands]
greet = actmat_toy:greet
[actmat.formats]
toytensors = actmat_toy:TOYTENSORS
[actmat.codecs]
toy = actmat_toy:CODEC
[actmat.experts]
toy = actmat_toy:FAMILY
reader.toy = actmat_toy:READER
[actmat.methods]
toy_first = actmat_toy:FIRST
[actmat.executors]
toy = actmat_toy:Executor
"""


class Shell:
    """`actmat` with the given folders first on the path, in forks of a process that has loaded the core."""

    def __init__(self, folder: Path, *path: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "300"}
        self._server = Server(folder, ["torch", "actmat.run", "actmat.cli.main"], self.environment)

    def python(self, code: str, *arguments: object) -> str:
        """A new process, which has loaded nothing."""
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, cwd=self.folder, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    def actmat(self, *arguments: object, fails: bool = False) -> str:
        status, text = self._server.start([str(a) for a in arguments]).wait()
        said = " ".join(text.split())
        assert (status != 0) is fails, said
        return said

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """The package with its extras removed."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "src" / "actmat", folder / "src" / "actmat", ignore=shutil.ignore_patterns("extras"))
    for name, k in (("base", 0.0), ("a", 1.0), ("b", 2.0)):
        save_checkpoint(folder / name, {"w": torch.full((4, 4), k)})
    shell = Shell(folder, folder / "src")
    yield shell
    shell.close()


MERGE = ("-b", "base", "-e", "a", "-e", "b", "-m", "average", "--set", "scope=all", "--threads", "1")


def test_run_needs_neither_extras_nor_api_nor_cli(core: Shell, tmp_path: Path) -> None:
    """`run` and all layers above it work with the three folders deleted."""
    bare = tmp_path / "src"
    gone = shutil.ignore_patterns("extras", "api", "cli")
    shutil.copytree(ROOT / "src" / "actmat", bare / "actmat", ignore=gone)
    code = """
from actmat.recipe import make_recipe
from actmat.run import plan_recipe, run_recipes
recipe = make_recipe({"base": "base", "experts": ["a", "b"], "method": "average", "scope": "all", "out": "bare"})
assert plan_recipe(recipe).items
(report,) = run_recipes([recipe])
from actmat.report.verify import verify
print("intact" if verify(report.out).ok else "damaged")
"""
    shell = core.environment
    core.environment = {**shell, "PYTHONPATH": str(bare)}
    try:
        assert core.python(code) == "intact"
    finally:
        core.environment = shell


def test_the_core_imports_and_helps_without_extras(core: Shell) -> None:
    assert "without" in core.python(
        "import actmat, importlib.util as u; print('with' if u.find_spec('actmat.extras') else 'without')"
    )
    assert "merge" in core.actmat("--help")


def test_the_core_merges_full_checkpoints_without_extras(core: Shell) -> None:
    core.actmat("plan", *MERGE[:-2])
    core.actmat("merge", *MERGE, "--out", "out")
    core.actmat("verify", "out")
    core.actmat("inspect", "out")
    core.actmat("diagnose", *MERGE[:-2])


def test_the_core_merges_adapters_of_peft_without_extras(core: Shell) -> None:
    tiny("llama").save_pretrained(core.folder / "llama")
    for seed, name in enumerate(("x", "y")):
        save_adapter(core.folder / name, "llama", seed, **LLAMA)
    core.actmat("merge", "-e", "x", "-e", "y", "-m", "average", "--out", "both")
    core.actmat("merge", "-b", "llama", "-e", "x", "-e", "y", "-m", "average", "--out", "model")
    core.actmat(
        "merge", "-b", "llama", "-e", "model", "-m", "average", "--to", "adapter", "--rank", "4", "--out", "extracted"
    )
    assert (core.folder / "extracted" / "adapter_config.json").is_file()
    assert (core.folder / "both" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.gguf": b"GGUF"}, "actmat.extras.gguf"),
        ({"model_index.json": b"{}"}, "actmat.extras.diffusion"),
        ({".metadata": b"", "__0_0.distcp": b""}, "actmat.extras.training"),
    ],
)
def test_a_format_of_a_removed_extra_is_named(core: Shell, files: dict[str, bytes], expected: str) -> None:
    folder = core.folder / expected
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    said = core.actmat("inspect", folder, fails=True)
    assert "a part of actmat was removed" in said
    assert expected in said
    assert "Fix: pip install --force-reinstall --no-deps actmat" in said


def test_a_method_of_a_removed_extra_is_named_and_not_listed(core: Shell) -> None:
    assert "actmat.extras.research" in core.actmat("plan", "-b", "base", "-e", "a", "-m", "tsv", fails=True)
    listed = json.loads(core.actmat("methods", "--json"))["methods"]
    assert {"ties", "tsv"} & {m["name"] for m in listed} == {"ties"}


def test_a_stack_of_removed_extras_is_named(core: Shell) -> None:
    said = core.actmat("merge", "-b", "base[0:1]", "--out", "stacked", "--plan", fails=True)
    assert "actmat.extras.stack" in said


def test_a_codec_a_family_and_a_store_of_removed_extras_are_named(core: Shell) -> None:
    codes = {"w.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "w.weight_scale": torch.ones(4, 1)}
    for name in ("q", "r"):
        (core.folder / name).mkdir()
        save_file(codes, core.folder / name / "model.safetensors")
    said = core.actmat("plan", "-b", "q", "-e", "r", "-m", "average", fails=True)
    assert "actmat.extras.quantized" in said

    loha = core.folder / "loha"
    loha.mkdir()
    (loha / "adapter_config.json").write_text(json.dumps({"peft_type": "LOHA", "r": 1}))
    save_file({"base_model.model.w.hada_w1_a": torch.ones(4, 1)}, loha / "adapter_model.safetensors")
    said = core.actmat("plan", "-b", "base", "-e", "loha", "-m", "average", fails=True)
    assert "actmat.extras.adapters" in said

    kohya = core.folder / "kohya.safetensors"
    save_file({"lora_unet_a.lora_down.weight": torch.ones(1, 4)}, kohya)
    assert "actmat.extras.diffusion" in core.actmat("inspect", kohya, fails=True)
    assert "actmat.extras.remote" in core.actmat("inspect", "s3://bucket/model", fails=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A distribution outside of the repository that adds one of each."""
    folder = tmp_path_factory.mktemp("toy")
    site = folder / "site"
    described = site / "actmat_toy-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: actmat-toy\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(ENTRIES)
    (site / "actmat_toy.py").write_text(TOY)
    for name, k in (("base", 0.0), ("a", 1.0), ("b", 2.0)):
        save_checkpoint(folder / name, {"w": torch.full((4, 4), k)})
    (folder / "json").mkdir()
    (folder / "json" / "model.toytensors").write_text(json.dumps({"w": [[3.0] * 4] * 4}))
    (folder / "ones").mkdir()
    (folder / "ones" / "toy_adapter.json").write_text(json.dumps({"tensor": "w"}))
    (folder / "read").mkdir()
    (folder / "read" / "adapter_config.json").write_text(json.dumps({"peft_type": "TOY"}))
    save_file({"base_model.model.toy": torch.ones(4, 4)}, folder / "read" / "adapter_model.safetensors")
    shell = Shell(folder, site, ROOT / "src")
    yield shell
    shell.close()


def merged(toy: Shell, out: str, *arguments: object) -> float:
    """The first value of `w` in a merge."""
    from safetensors.torch import load_file

    toy.actmat("merge", "-b", "base", *arguments, "--set", "scope=all", "--threads", "1", "--out", out)
    return float(load_file(toy.folder / out / "model.safetensors")["w"][0, 0])


def test_a_command_comes_in(toy: Shell) -> None:
    assert "greet" in toy.actmat("--help")
    assert "hello of the toy" in toy.actmat("greet")


@pytest.mark.parametrize(("location", "value"), [("json", 3.0), ("ones", 1.0), ("read", 1.0)])
def test_a_format_a_family_and_a_reader_come_in(toy: Shell, location: str, value: float) -> None:
    assert merged(toy, f"of_{location}", "-e", location, "-e", "a", "-m", "average") == (value + 1.0) / 2
    if location != "ones":  # a family without `open_stored`
        toy.actmat("verify", f"of_{location}")


def test_a_method_comes_in(toy: Shell) -> None:
    assert merged(toy, "first", "-e", "b", "-e", "a", "-m", "toy_first") == 2.0


def test_a_codec_comes_in(toy: Shell) -> None:
    save_file({"w.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, toy.folder / "codes.safetensors")
    toy.actmat("inspect", "codes.safetensors")
    assert (toy.folder / "asked_codec").exists()


def test_an_executor_comes_in(toy: Shell) -> None:
    assert merged(toy, "run", "-e", "a", "-e", "b", "-m", "average", "--set", "executor=toy") == 1.5
    assert (toy.folder / "ran_executor").exists()


def test_a_plain_merge_imports_no_extra(toy: Shell) -> None:
    code = """
import sys
sys.argv = ["actmat", *sys.argv[1:]]
from actmat.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("EXTRAS", [m for m in sys.modules if m.startswith("actmat.extras.")])
"""
    assert "EXTRAS []" in toy.python(code, "merge", *MERGE, "--out", "plain")
