"""The core works without `actmat/extras`, and another distribution adds what extras add, by entry points only."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.merge_server import Server
from tests.helpers.merging import save_checkpoint
from tests.helpers.repository import ROOT

TOY = '''
import json
from pathlib import Path

import torch
import typer

from actmat.checkpoints.base import TensorsHandle
from actmat.checkpoints.memory import MemoryTensors
from actmat.checkpoints.model import Format, Model
from actmat.engine.executors.threads import ThreadExecutor
from actmat.methods import Merged, MergeMethod


def greet() -> None:
    """Say hello."""
    typer.echo("hello of the toy")


class JsonTensors(MemoryTensors):
    """Tensors in JSON."""

    def __init__(self, source):
        self.source = source
        values = json.loads(source.fetch(names_of(source)[0]).read_text())
        super().__init__({n: torch.tensor(v) for n, v in values.items()}, location=source.location)

    def identity(self):
        return self.source.identity(names_of(self.source))

    def handle(self):
        return TensorsHandle(self.source.address, self.location)


def names_of(source):
    return [n for n in source.weights if n.endswith(".toytensors")]


TOYTENSORS = Format(
    lambda source: bool(names_of(source)), lambda source: Model(JsonTensors(source))
)


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
[actmat.methods]
toy_first = actmat_toy:FIRST
[actmat.executors]
toy = actmat_toy:Executor
"""


class Shell:
    """`actmat` with the given folders first on the path, in forks of a process that has loaded the core.

    Its folder holds three checkpoints of one matrix: `base` of zeros, `a` of ones, `b` of twos.
    """

    def __init__(self, folder: Path, *path: Path) -> None:
        self.folder, self._path = folder, os.pathsep.join(map(str, path))
        for value, name in enumerate(("base", "a", "b")):
            save_checkpoint(folder / name, {"w": torch.full((4, 4), float(value))})
        environment = {**os.environ, "PYTHONPATH": self._path, "COLUMNS": "300"}
        self._server = Server(folder, ["torch", "actmat.run", "actmat.cli.main"], environment)

    def python(self, code: str, *arguments: object, path: Path | None = None) -> str:
        """A new process, which has loaded nothing."""
        environment = {**os.environ, "PYTHONPATH": str(path or self._path)}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=self.folder, timeout=300, check=False
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


def core_without(folder: Path, *names: str) -> Path:
    """A copy of the package without these folders."""
    shutil.copytree(ROOT / "src" / "actmat", folder / "actmat", ignore=shutil.ignore_patterns(*names))
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """The package with its extras removed."""
    folder = tmp_path_factory.mktemp("core")
    shell = Shell(folder, core_without(folder / "src", "extras"))
    yield shell
    shell.close()


MERGE = ("-b", "base", "-e", "a", "-e", "b", "-m", "average", "--set", "scope=all", "--threads", "1")


def test_run_needs_neither_extras_nor_api_nor_cli(core: Shell, tmp_path: Path) -> None:
    """`run` and all layers above it work with the three folders deleted."""
    code = """
from actmat.recipe import make_recipe
from actmat.run import plan_recipe, run_recipes
recipe = make_recipe({"base": "base", "experts": ["a", "b"], "method": "average", "scope": "all", "out": "bare"})
assert plan_recipe(recipe).items
(report,) = run_recipes([recipe])
from actmat.report.verify import verify
print("intact" if verify(report.out).ok else "damaged")
"""
    assert core.python(code, path=core_without(tmp_path, "extras", "api", "cli")) == "intact"


def test_the_core_merges_full_checkpoints_without_extras(core: Shell) -> None:
    assert "merge" in core.actmat("--help")
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
    extracted = ("--to", "adapter", "--rank", "4", "--out", "extracted")
    core.actmat("merge", "-b", "llama", "-e", "model", "-m", "average", *extracted)
    assert (core.folder / "extracted" / "adapter_config.json").is_file()
    assert (core.folder / "both" / "adapter_config.json").is_file()


def test_what_removed_extras_add_is_refused(core: Shell) -> None:
    """A method, a stack, a codec, a family of adapters, a tool's file, a store, and formats."""
    for place, name in (("gguf", "model.gguf"), ("diffusion", "model_index.json"), ("training", ".metadata")):
        (core.folder / place).mkdir()
        (core.folder / place / name).write_bytes(b"{}")
    codes = {"w.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "w.weight_scale": torch.ones(4, 1)}
    for name in ("q", "r"):
        save_folder(core.folder / name, codes)
    (core.folder / "loha").mkdir()
    (core.folder / "loha" / "adapter_config.json").write_text(json.dumps({"peft_type": "LOHA", "r": 1}))
    loha = {"base_model.model.w.hada_w1_a": torch.ones(4, 1)}
    save_file(loha, core.folder / "loha" / "adapter_model.safetensors")
    save_file({"lora_unet_a.lora_down.weight": torch.ones(1, 4)}, core.folder / "kohya.safetensors")
    for says, command in {
        "no method 'tsv'": ("plan", "-b", "base", "-e", "a", "-m", "tsv"),
        "plug-in 'view.stack'": ("plan", "-b", "base[0:1]", "--out", "stacked"),
        "look quantized": ("plan", "-b", "q", "-e", "r", "-m", "average"),
        "peft_type is 'LOHA'": ("plan", "-b", "base", "-e", "loha", "-m", "average"),
        "no installed part of actmat reads": ("inspect", "kohya.safetensors"),
        "no installed part of actmat serves": ("inspect", "s3://bucket/model"),
        "found model.gguf": ("inspect", "gguf"),
        "found model_index.json": ("inspect", "diffusion"),
        "found .metadata": ("inspect", "training"),
    }.items():
        assert says in " ".join(core.actmat(*command, fails=True).split()), says
    listed = json.loads(core.actmat("methods", "--json"))["methods"]
    assert {"ties", "tsv"} & {m["name"] for m in listed} == {"ties"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A distribution outside of the repository that adds things of four kinds."""
    folder = tmp_path_factory.mktemp("toy")
    described = folder / "site" / "actmat_toy-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: actmat-toy\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(ENTRIES)
    (folder / "site" / "actmat_toy.py").write_text(TOY)
    (folder / "json").mkdir()
    (folder / "json" / "model.toytensors").write_text(json.dumps({"w": [[3.0] * 4] * 4}))
    shell = Shell(folder, folder / "site", ROOT / "src")
    yield shell
    shell.close()


def test_another_distribution_adds_a_command_a_format_a_method_and_an_executor(toy: Shell) -> None:
    assert "greet" in toy.actmat("--help")
    assert "hello of the toy" in toy.actmat("greet")
    for out, experts, method, value in (
        ("format", ("json", "a"), "average", 2.0),
        ("method", ("b", "a"), "toy_first", 2.0),
        ("executor", ("a", "b"), "average", 1.5),
    ):
        inputs = [word for expert in experts for word in ("-e", expert)]
        flags = ("--set", "scope=all", "--threads", "1", "--out", out, *["--set", "executor=toy"] * (out == "executor"))
        toy.actmat("merge", "-b", "base", *inputs, "-m", method, *flags)
        assert float(load_file(toy.folder / out / "model.safetensors")["w"][0, 0]) == value
        toy.actmat("verify", out)
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
