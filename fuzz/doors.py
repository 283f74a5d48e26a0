"""Doors of files: each writes a mutated file and gives it to the reader that users reach it through."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from actmat.api.diagnosing import recipe_of_output
from actmat.checkpoints.header import read_header
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.writing.staging import JOURNAL_NAME, MANIFEST_NAME, Staging, check_output_path
from actmat.diagnostics.model import read_diagnosis
from actmat.engine.task import Record
from actmat.experts.resolve import is_adapter, open_adapter
from actmat.layout import resolve_layout
from actmat.recipe import load_recipe
from actmat.report.manifest import read_manifest
from actmat.statistics.header import parse_header
from actmat.statistics.store import open_statistics
from fuzz.harness import door, guarded

ODD = ["", "x", "\x1b[2J", "../x", "\u202e", "\ud800", "a" * 300, "model.safetensors", "NaN"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 9),
    st.floats(),
    st.sampled_from(ODD),
    st.text(max_size=8),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ODD) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


def mutated_bytes(data: st.DataObject, content: bytes) -> bytes:
    """The content with a few bytes replaced, inserted or cut."""
    out = bytearray(content)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, max(len(out) - 1, 0)))
        kind = data.draw(st.sampled_from(["set", "insert", "cut", "end"]))
        if kind == "set" and out:
            out[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            out[at:at] = data.draw(st.binary(max_size=8))
        elif kind == "cut":
            del out[at : at + data.draw(st.integers(1, 8))]
        elif kind == "end":
            del out[at:]
    return bytes(out)


def mutated_json(data: st.DataObject, value: Any) -> Any:
    """The value with a few of its parts replaced, added or removed."""
    out = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        node = out
        for _ in range(data.draw(st.integers(0, 3))):
            inner = [v for v in (node.values() if isinstance(node, dict) else node) if isinstance(v, dict | list) and v]
            if not inner:
                break
            node = data.draw(st.sampled_from(inner))
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if isinstance(node, dict) and (not keys or data.draw(st.booleans())):
            node[data.draw(st.sampled_from(ODD))] = data.draw(JSON)
        elif keys:
            key = data.draw(st.sampled_from(keys))
            if data.draw(st.booleans()):
                node[key] = data.draw(JSON)
            else:
                del node[key]
        if not out:
            break
    return out


def drawn_text(data: st.DataObject, value: Any) -> bytes:
    """JSON text of a mutated value, sometimes with damaged bytes."""
    text = json.dumps(mutated_json(data, value)).encode()
    return mutated_bytes(data, text) if data.draw(st.integers(0, 3)) == 0 else text


@cache
def weights() -> bytes:
    """A small safetensors file."""
    return save({"model.a.weight": torch.ones(2, 3), "model.b": torch.zeros(4)}, {"format": "pt"})


@door("headers")
def headers(data: st.DataObject) -> None:
    """Headers of safetensors files."""
    entries = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    text = drawn_text(data, entries)
    content = (
        mutated_bytes(data, weights()) if data.draw(st.booleans()) else struct.pack("<Q", len(text)) + text + bytes(24)
    )
    guarded(lambda: read_header(lambda at, n: content[at : at + n], len(content), file="x"))


def in_folder(name: str, content: bytes, read: Any, **others: bytes) -> None:
    """Write files into a folder, and guard the reader, which takes the folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for file, text in {name: content, **{k.replace("__", "."): v for k, v in others.items()}}.items():
            (folder / file).write_bytes(text)
        guarded(lambda: read(folder))


def opened(folder: Path) -> None:
    """Open a checkpoint, resolve its layout and read every tensor."""
    with open_checkpoint(folder) as checkpoint:
        resolve_layout(checkpoint.specs, checkpoint.config)
        for name in checkpoint.specs:
            checkpoint.read(name)


@door("indexes")
def indexes(data: st.DataObject) -> None:
    """Shard indexes."""
    index = {
        "metadata": {"total_size": 40},
        "weight_map": {"model.a.weight": "m.safetensors", "model.b": "m.safetensors"},
    }
    in_folder("model.safetensors.index.json", drawn_text(data, index), opened, m__safetensors=weights())


@door("configs")
def configs(data: st.DataObject) -> None:
    """`config.json` of a checkpoint."""
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "tie_word_embeddings": True,
              "text_config": {"num_key_value_heads": 2}, "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    in_folder("config.json", drawn_text(data, config), opened, model__safetensors=weights())


@cache
def factors() -> bytes:
    """Weights of a small adapter."""
    stem = "base_model.model.model.layers.0.q_proj"
    return save({f"{stem}.lora_A.weight": torch.ones(2, 4), f"{stem}.lora_B.weight": torch.ones(4, 2)})


@door("adapter configs")
def adapter_configs(data: st.DataObject) -> None:
    """`adapter_config.json` of a LoRA adapter."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {},
              "target_modules": ["q_proj"], "bias": "none"}  # fmt: skip

    def read(folder: Path) -> None:
        with open_adapter(folder) as adapter:
            for module in adapter.modules.values():
                if not adapter.problems:
                    adapter.factors(module, torch.float32)

    in_folder("adapter_config.json", drawn_text(data, config), read, adapter_model__safetensors=factors())


@cache
def torch_files() -> tuple[bytes, bytes, bytes]:
    """A small state dict as a zip file, as a legacy file, and its pickle."""
    out = []
    for as_zip in (True, False):
        file = io.BytesIO()
        content = {"a": torch.ones(2, 3), "b": torch.nn.Parameter(torch.zeros(4)), "c": torch.ones(6)[::2]}
        torch.save(content, file, _use_new_zipfile_serialization=as_zip)
        out.append(file.getvalue())
    with zipfile.ZipFile(io.BytesIO(out[0])) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        return out[0], out[1], archive.read(name)


OPCODES = [op.code.encode("latin1") for op in pickletools.opcodes]


@door("torch files")
def torch_checkpoints(data: st.DataObject) -> None:
    """Files of `torch.save`: damaged ones, and whole ones with a pickle of random opcodes."""
    as_zip, legacy, pickled = torch_files()
    kind = data.draw(st.sampled_from(["zip", "legacy", "pickle", "opcodes"]))
    if kind in ("zip", "legacy"):
        content = mutated_bytes(data, as_zip if kind == "zip" else legacy)
    else:
        ops = data.draw(st.lists(st.sampled_from(OPCODES) | st.binary(max_size=5), max_size=40))
        text = mutated_bytes(data, pickled) if kind == "pickle" else b"\x80\x02" + b"".join(ops) + b"."
        file = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(as_zip)) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                new.writestr(name, text if name.endswith("data.pkl") else old.read(name))
        content = file.getvalue()

    def read(folder: Path) -> None:
        is_adapter(folder / "m.pt")
        opened(folder / "m.pt")

    in_folder("m.pt", content, read)


@door("manifests")
def manifests(data: st.DataObject) -> None:
    """Manifests as `verify`, `compare` and `diagnose` first read them."""
    manifest = {
        "actmat_manifest": 1,
        "base": None,
        "experts": [],
        "output": {"content": "0"},
        "tensors": [],
        "recipe": {},
    }
    in_folder(MANIFEST_NAME, drawn_text(data, manifest), read_manifest)


@door("reports")
def reports(data: st.DataObject) -> None:
    """`report.json`."""
    report = {"format": 1, "kind": "diagnosis", "forecast": None, "experts": [], "tensors": [], "measures": []}
    in_folder("report.json", drawn_text(data, report), read_diagnosis)


@door("journals")
def journals(data: st.DataObject) -> None:
    """Journals of an interrupted run."""
    entry = {"name": "a", "hash": "0", "hashes": {"a": "0"}, "base_hash": "0", "expert_hashes": ["1"], "stats": {},
             "unchanged": False, "nonfinite": 0, "seconds": 0.1}  # fmt: skip
    head = json.dumps({"actmat_journal": 1, "fingerprint": "f"}).encode()
    lines = [head, *(drawn_text(data, entry) for _ in range(data.draw(st.integers(0, 3))))]
    content = b"\n".join(lines) + b"\n" * data.draw(st.integers(0, 1))

    def read(folder: Path) -> None:
        stage = Staging(folder / "out", "f")
        stage.path.mkdir()
        (folder / "j").rename(stage.path / JOURNAL_NAME)
        try:
            for line in stage.open().values():
                Record.from_json(line)
        finally:
            stage.close()

    in_folder("j", mutated_bytes(data, content), read)


@door("statistics")
def statistics(data: st.DataObject) -> None:
    """Statistics files, and the metadata in them."""
    zero = "0" * 32
    header = {"format": 1, "model": {"location": "m", "content": zero, "tensors": {"w": zero}}, "data": [], "samples": 1,
              "tokens": 1, "grams": {"w": {"width": 2, "rows": 1, "hash": zero}}, "places": {"w": [{"gram": "w"}]}}  # fmt: skip
    text = drawn_text(data, header).decode("utf-8", "replace")
    guarded(lambda: parse_header({"actmat_statistics": text}, "x"))
    content = save({"gram.w": torch.ones(3)}, {"actmat_statistics": text})
    in_folder("statistics.safetensors", mutated_bytes(data, content), open_statistics)


PARTS = st.sampled_from(
    ["..", ".", "", "~", "~nobody_x", "x", "\udcff", "\0", "\n", "a" * 256, "dev", "zero", "proc", "hf:"]
)


@door("paths")
def paths(data: st.DataObject) -> None:
    """Texts that users give as places of inputs and outputs."""
    parts = data.draw(st.lists(PARTS | st.text(max_size=5), max_size=6))
    text = "/".join(parts)[: data.draw(st.sampled_from([10, 5000]))]
    # no text is a hub id: nothing here may ask a network
    text = text if text.count("/") != 1 else f"./{text}"
    for read in (open_checkpoint, is_adapter, open_statistics, load_recipe):
        guarded(lambda read=read: read("./" + text if text[:1] not in "~/." else text))
    guarded(lambda: read_manifest(Path(text)))
    guarded(lambda: recipe_of_output(text))
    guarded(lambda: check_output_path(Path(text), overwrite=False, inputs={}))
