"""A small Llama-like base with experts on disk, and the command line run in this process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import save_folder
from torch import Tensor

from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.cli import listing

WIDTH, INNER, VOCAB = 8, 12, 20
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}

Q0 = "model.layers.0.self_attn.q_proj.weight"
UP0 = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def llama_tensors(layers: int = 2, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of a base, reproducible."""
    rng = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    tensors = {EMBEDDING: gaussian(VOCAB, WIDTH)}
    for i in range(layers):
        stem = f"model.layers.{i}"
        tensors[f"{stem}.input_layernorm.weight"] = gaussian(WIDTH)
        tensors[f"{stem}.self_attn.q_proj.weight"] = gaussian(WIDTH, WIDTH)
        tensors[f"{stem}.mlp.up_proj.weight"] = gaussian(INNER, WIDTH)
        tensors[f"{stem}.mlp.down_proj.weight"] = gaussian(WIDTH, INNER)
    tensors[NORM] = gaussian(WIDTH)
    tensors["lm_head.weight"] = gaussian(VOCAB, WIDTH)
    return tensors


def expert_of(base: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The base with a small change everywhere."""
    rng = torch.Generator().manual_seed(1000 + seed)
    return {
        name: (tensor.float() + 0.05 * torch.randn(tensor.shape, generator=rng)).to(tensor.dtype)
        for name, tensor in base.items()
    }


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] | None = None) -> Path:
    """A folder with `config.json`, a tokenizer file and `model.safetensors`."""
    save_folder(folder, tensors, CONFIG if config is None else config)
    (folder / "tokenizer.json").write_text(json.dumps({"version": folder.name}))
    return folder


@dataclass(frozen=True)
class Family:
    """A base and its experts on disk."""

    root: Path
    base: Path
    experts: tuple[Path, ...]

    @classmethod
    def make(cls, root: Path, *, layers: int = 2, experts: int = 2, dtype: torch.dtype = torch.float32) -> Family:
        tensors = llama_tensors(layers, dtype=dtype)
        base = save_checkpoint(root / "base", tensors)
        made = [save_checkpoint(root / f"expert{t}", expert_of(tensors, t)) for t in range(experts)]
        return cls(root, base, tuple(made))

    @property
    def out(self) -> Path:
        """Where the tests write."""
        return self.root / "out"

    def change(self, folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
        """Edit the tensors of one checkpoint in place and save it again."""
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def argv(self, *flags: str, command: str = "merge") -> list[str]:
        """`actmat merge` of this family; `--out` unless it is a plan."""
        inputs = ["--base", str(self.base), *(x for e in self.experts for x in ("--expert", str(e)))]
        place = ["--out", str(self.out), "--threads", "1", "--quiet"] if command == "merge" else []
        return [command, *inputs, *place, *flags]


@dataclass(frozen=True)
class Outcome:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """All of it in one line, without wraps and frames."""
        return " ".join(f"{self.out} {self.err}".replace("│", " ").split())


_kept_command = functools.cache(listing._typer_command)
"""Commands with their flags, built once per process: of a small merge, building them takes most of the time."""


def actmat(argv: Sequence[object], *, code: int | None = None) -> Outcome:
    """The command line through its entry point, in this process; `code` is the exit code that is expected."""
    from actmat.cli.main import main

    words, out, err, status = [*map(str, argv)], io.StringIO(), io.StringIO(), 0
    made = listing._typer_command if {"-h", "--help"} & {*words} else _kept_command  # help shortens its command
    with (
        mock.patch.object(listing, "_typer_command", made),
        mock.patch.object(sys, "argv", ["actmat", *words]),
        mock.patch.dict("os.environ", {"COLUMNS": "80", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    outcome = Outcome(status, out.getvalue(), err.getvalue())
    assert code in (None, status), f"exit code {status}, expected {code}:\n{outcome.out}{outcome.err}"
    return outcome


def actmat_command(*arguments: object, code: int = 0) -> str:
    """What `actmat` prints, errors included, of a command with this exit code."""
    found = actmat(arguments, code=code)
    return found.out + found.err


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a merged model; the manifest without `timing`."""
    files = {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
    manifest = json.loads(files["actmat_manifest.json"])
    del manifest["timing"]
    return files | {"actmat_manifest.json": json.dumps(manifest, sort_keys=True).encode()}


def flip(file: Path, place: int = -1) -> None:
    """Change a bit of a byte."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def hidden(folder: Path) -> list[str]:
    """What a merge left beside its output."""
    return sorted(p.name for p in folder.iterdir() if ".actmat-" in p.name)


def card(out: Path) -> tuple[dict[str, Any], str]:
    """YAML head and body of a model card."""
    _, head, body = (out / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def weights(folder: Path) -> dict[str, bytes]:
    """Files that do not tell where inputs lie."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in (MANIFEST_NAME, "README.md")}


def loaded_whole(loader: Any, folder: Path, **how: Any) -> Any:
    """The model as `from_pretrained` gives it; nothing may be missing or left over."""
    model, info = loader.from_pretrained(folder, output_loading_info=True, **how)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model
