"""Files that others wrote: regular, of bounded size and depth, JSON included."""

import contextlib
import copy
import io
import itertools
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoint_files import save_lora
from tests.helpers.located import is_adapter
from tests.helpers.merging import CONFIG, Family, actmat, hidden

from actmat import bounds
from actmat.api.reading import read_recipe
from actmat.checkpoints.formats import pickles
from actmat.checkpoints.formats.pickles import PickleError, check_pickle
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.checkpoints.writing.staging import JOURNAL_NAME
from actmat.errors import CheckpointError, MergeError, OutputError, RecipeError, StatisticsError
from actmat.identity.reading import read_configs

# Files that others wrote: links, pipes, devices, bombs and odd paths end in one error of ours, at once.


@pytest.mark.parametrize("name", ["tokenizer.json", "modeling.py", "config.json", "vocab.txt"])
@pytest.mark.parametrize("command", ["merge", "plan"])
def test_a_file_that_links_out_of_the_base_is_not_copied(family: Family, name: str, command: str) -> None:
    secret = family.root / "secret"
    secret.write_text('{"key": "secret"}')
    (family.base / name).unlink(missing_ok=True)
    (family.base / name).symlink_to(secret)
    outcome = actmat(family.argv(command=command), code=1)
    assert f"{family.base / name}: is a link to {secret}, outside its folder" in outcome.err
    assert not family.out.exists()


def test_a_tokenizer_that_links_out_of_the_named_expert_is_not_copied(family: Family) -> None:
    (family.experts[0] / "vocab.txt").symlink_to("/etc/hostname")
    actmat(family.argv("--set", "files_from=expert0"), code=1)
    actmat(family.argv(), code=0)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def itself(path: Path) -> None:
    path.symlink_to(path)


ODD = [pipe, endless, folder, dangling, itself]


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize(
    "name",
    ["f.bin", "f.pt", "model.safetensors", "m.safetensors.index.json", "r.yaml", "report.json", "actmat_manifest.json"],
)
def test_what_is_no_regular_file_is_refused_by_every_reader(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    make(tmp_path / name)
    path = str(tmp_path / name)
    commands = [["inspect", path], ["plan", path], ["verify", str(tmp_path)], ["diagnose", path]]
    commands += [
        ["plan", "-b", path, "-e", path],
        ["inspect", str(tmp_path)],
    ]
    for argv in commands:
        outcome = actmat(argv)
        assert outcome.code in (1, 2), (argv, outcome)


@pytest.mark.parametrize("make", [pipe, endless, dangling, itself])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_a_folder_with_something_else_in_place_of_a_file(
    family: Family, make: Callable[[Path], None], name: str
) -> None:
    (family.base / name).unlink(missing_ok=True)
    make(family.base / name)
    outcome = actmat(family.argv(), code=1)
    assert name in outcome.err


PATHS = {
    "too long": "x" * 5000,
    "name too long": "a/" + "x" * 300,
    "unknown user": "~nobody_of_this_name/model",
    "not UTF-8": "\udcff\udcfe",
    "NUL": "a\0b",
    "below a file": "/etc/hostname/x",
    "deep": "a/" * 3000,
}


@pytest.mark.parametrize("case", PATHS)
def test_paths_that_cannot_be_looked_up(family: Family, case: str) -> None:
    text = PATHS[case]
    for call in (open_model, is_adapter, read_recipe):
        try:
            assert call(text) is False, "only is_adapter may answer"
        except (CheckpointError, RecipeError) as error:
            str(error).encode()
    if case == "NUL":  # cannot be typed
        return
    flags = ["--base", "--expert", "--out"]
    commands = [[*family.argv(), flag, text] for flag in flags] + [
        [c, text] for c in ("diagnose", "verify", "inspect", "plan")
    ]
    for argv in commands:
        assert actmat(argv).code in (1, 2), argv
    assert not family.out.exists()


def test_an_output_in_a_file_system_of_the_kernel(family: Family) -> None:
    outcome = actmat(family.argv("--out", "/proc/x"), code=1)
    assert "Cannot write to /proc" in outcome.err


def test_a_folder_that_is_not_listed(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be listed: Permission denied"):
        open_tensors(family.base)


def text_file(path: Path) -> None:
    path.write_bytes(b"\xff\x00junk")


def link_to_folder(path: Path) -> None:
    (path.parent / "mine").mkdir(exist_ok=True)
    (path.parent / "mine" / "precious").write_text("mine")
    path.symlink_to(path.parent / "mine")


@pytest.mark.parametrize("make", [pipe, endless, dangling, itself, text_file, link_to_folder, folder])
@pytest.mark.parametrize("suffix", ["partial", "previous", "lock"])
def test_something_else_with_the_name_of_a_run(family: Family, make: Callable[[Path], None], suffix: str) -> None:
    place = family.root / f".out.actmat-{suffix}"
    make(place)
    ours = make is (text_file if suffix == "lock" else folder)
    outcome = actmat(family.argv("--overwrite"), code=0 if ours else 1)
    if not ours:
        assert f"{place} is in the way" in outcome.err
        assert not family.out.exists()
    if make is link_to_folder:
        assert [p.name for p in (family.root / "mine").iterdir()] == ["precious"]


@pytest.mark.parametrize("make", [*ODD, text_file, link_to_folder])
@pytest.mark.parametrize("name", [JOURNAL_NAME, "model.safetensors", "config.json"])
def test_something_else_in_a_partial_folder(family: Family, make: Callable[[Path], None], name: str) -> None:
    actmat(family.argv(), code=0)
    expected = (family.out / "model.safetensors").read_bytes()
    partial = family.root / ".other.actmat-partial"
    partial.mkdir()
    make(partial / name)
    actmat(family.argv("--out", str(family.root / "other")), code=0)
    assert (family.root / "other" / "model.safetensors").read_bytes() == expected
    assert hidden(family.root) == []


def test_a_stale_unfinished_report_is_replaced_not_written_through(tmp_path: Path) -> None:
    from actmat.diagnostics.model import write_whole

    (tmp_path / "target").write_text("mine")
    (tmp_path / ".x.json.part").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "x.json", [b"new"])
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "x.json").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 100_000, "expected JSON"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested more than 100 deep"),
        (b'{"a": [' + b"[]," * 5_000_000 + b"1]}", "at most 4000000 values"),
        (b'{"a": ' + b"9" * 5000 + b"}", "expected JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b"\xff", "expected JSON"),
    ],
)
def test_json_beyond_the_bounds(text: bytes, said: str) -> None:
    for error in (CheckpointError, StatisticsError):
        with pytest.raises(error, match=said):
            bounds.parse_object(text, "x.json", error=error)


def test_a_file_larger_than_it_says_is_not_read_to_its_end() -> None:
    with pytest.raises(CheckpointError, match="at most 10 bytes"):
        bounds.read_bytes(Path("/proc/self/environ"), most=10)


def torch_file(path: Path, content: bytes, *, compressed: bool = False) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return path


PROTO, STOP = b"\x80\x02", b"."
PICKLES = {
    "marks": (b"(" * 1_000_000, "more than 1000 open marks"),
    "opcodes": (b"N" * 10_000, "more than 9000 opcodes"),
    "nested tuple": (b")" + b"\x85" * 100_000 + b"q\x00}h\x00Ns", "a tuple of"),
    "doubling tuple": (b")q\x00" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(60)) + b"}h\x00Ns", "a tuple of"),
    "array": (b"cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x01\x85R", "an array of bytes"),
}


@pytest.mark.parametrize("case", PICKLES)
@pytest.mark.parametrize("as_zip", [True, False])
def test_pickles_beyond_the_bounds(tmp_path: Path, case: str, as_zip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body, said = PICKLES[case]
    if case == "opcodes":  # a million of them take seconds
        assert pickles.MAX_TORCH_OPCODES == 1_000_000
        monkeypatch.setattr(pickles, "MAX_TORCH_OPCODES", 9000)
    content = PROTO + body + STOP
    path = tmp_path / "m.pt"
    if as_zip:
        torch_file(path, content)
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        open_tensors(path)
    with pytest.raises(PickleError):
        check_pickle(io.BytesIO(content))
    with pytest.raises(CheckpointError, match=said):
        is_adapter(path)


def test_a_compressed_pickle_is_not_unpacked(tmp_path: Path) -> None:
    torch_file(tmp_path / "m.pt", bytes(50_000_000), compressed=True)
    with pytest.raises(
        CheckpointError, match=r"the compressed record 'archive/data.pkl', \d+ bytes that unpack to 50000000"
    ):
        open_tensors(tmp_path / "m.pt")


def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(10**12), "v": torch.zeros(1).expand(20)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"repeat stored values") as caught:
        open_tensors(tmp_path / "m.pt")
    assert len(caught.value.problems) == 1, "a small one is copied out"
    assert "1000000000000 float32" in caught.value.problems[0]


def test_a_tar_archive_is_not_unpacked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "m.pt", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(CheckpointError, match="tar archive"):
        open_tensors(tmp_path / "m.pt")


def test_a_header_of_too_many_values_is_not_parsed(tmp_path: Path) -> None:
    text = b'{"a":[' + b"[]," * 5_000_000 + b"1]}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="at most 4000000 values"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("protocol", range(6))
def test_ordinary_pickles_pass(protocol: int) -> None:
    check_pickle(io.BytesIO(pickle.dumps({f"layer.{i}": (i, [i, {"a": 1.5}]) for i in range(1000)}, protocol)))


def test_errors_are_those_of_the_tree() -> None:
    for error in (CheckpointError, RecipeError, StatisticsError, OutputError):
        with pytest.raises(error):
            bounds.local_path("", error=error)
        assert issubclass(error, MergeError)
    assert json.loads(json.dumps(bounds.parse_object(b"{}", "x"))) == {}


# Hostile values in every JSON file that comes with a model: read, or refused by name, and never a bug.


DIGITS = 10**4000


def nested(depth: int, kind: str) -> Any:
    out: Any = 1
    for _ in range(depth):
        out = [out] if kind == "list" else {"a": out}
    return out


VALUES: tuple[Any, ...] = (
    [], [1], [[[]]], {}, {"a": 1}, DIGITS, -DIGITS, 10**90, -(10**90), 2**63, 0, -1, 0.5, float("inf"), float("nan"),
    1e308, "x", "", None, True, ["a", 5, None], nested(90, "list"), nested(90, "object"), nested(120, "list"),
)  # fmt: skip
PER_KEY = 2
"""Values of each key, so that all doors take seconds; other keys get the others."""
MODEL = {
    **CONFIG, "num_hidden_layers": 2, "torch_dtype": "float32", "auto_map": {"AutoModel": "m.M"}, "head_dim": 4,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4, "layer_types": ["full_attention"] * 2,
    "id2label": {"0": "A", "1": "B"}, "text_config": {"hidden_size": 8}, "vision_config": {"hidden_size": 8},
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "num_experts": 4, "sliding_window": 5, "eos_token_id": [1], "rms_norm_eps": 1e-6,
}  # fmt: skip
LORA = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q.*": 4},
    "target_modules": ["q_proj"], "bias": "none", "use_rslora": False, "fan_in_fan_out": False, "use_dora": False,
    "modules_to_save": [], "base_model_name_or_path": "org/base", "layers_to_transform": [0], "layers_pattern": "l",
    "layer_replication": [[0, 2]], "task_type": "CAUSAL_LM", "target_parameters": ["x"], "trainable_token_indices": [1],
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
}  # fmt: skip
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 2, "content": "<x>", "special": True}],
}
SETTINGS = {"added_tokens_decoder": {"0": {"content": "<x>"}}, "chat_template": "x", "eos_token": {"content": "x"}}
DOORS: dict[str, tuple[str, str, Any, str]] = {
    "base config": ("base", "config.json", MODEL, "plan"),
    "expert config": ("expert0", "config.json", MODEL, "plan"),
    "adapter on a base": ("adapter", "adapter_config.json", LORA, "plan adapter"),
    "adapters": ("adapter", "adapter_config.json", LORA, "plan adapters"),
    "index": ("base", "model.safetensors.index.json", {"metadata": {}, "weight_map": {"a": "x.safetensors"}}, "plan"),
    "tokenizer": ("expert0", "tokenizer.json", TOKENIZER, "plan"),
    "tokenizer settings": ("base", "tokenizer_config.json", SETTINGS, "merge"),
    "generation": ("base", "generation_config.json", {"eos_token_id": [1], "temperature": 1.0}, "merge"),
    "modules": ("base", "modules.json", [{"idx": 0, "name": "0", "path": "1_Pooling", "type": "x"}], "merge"),
    "pipeline": ("base", "model_index.json", {"_class_name": "X", "unet": ["diffusers", "X"]}, "plan"),
    "manifest": ("out", "actmat_manifest.json", None, "verify"),
}  # fmt: skip


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys and first elements of a JSON value, nested ones too."""
    yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in itertools.islice(inner, 40):
        yield from places(part, (*above, key))


def changed(value: Any, place: tuple[Any, ...], to: Any) -> Any:
    if not place:
        return to
    out = copy.deepcopy(value)
    inner = out
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = to
    return out


@pytest.fixture(scope="module")
def json_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp("doors")
    made = Family.make(root, layers=1)
    for name in ("adapter", "other"):
        factors = {"model.layers.0.self_attn.q_proj": (torch.ones(2, 8), torch.ones(8, 2))}
        save_lora(root / name, factors, target_modules=["q_proj"])
    actmat(made.argv("--method", "average", "--diagnose"), code=0)
    return made


def commands(json_family: Family, kind: str) -> list[str]:
    adapter, other, out = (str(json_family.root / n) for n in ("adapter", "other", "out"))
    return {
        "plan": json_family.argv("--method", "average", command="plan"),
        "plan adapter": ["plan", "--base", str(json_family.base), "--expert", adapter],
        "plan adapters": ["plan", "--expert", adapter, "--expert", other],
        "merge": json_family.argv("--method", "average", "--out", str(json_family.root / "again"), "--overwrite"),
        "verify": ["verify", out],
    }[kind]


@contextlib.contextmanager
def kept(file: Path) -> Iterator[bytes | None]:
    """The content of a file that may change meanwhile; None: there is none."""
    before = file.read_bytes() if file.exists() else None
    yield before
    file.unlink() if before is None else file.write_bytes(before)


@pytest.mark.parametrize("door", DOORS)
def test_a_hostile_value_is_read_or_refused(json_family: Family, door: str) -> None:
    folder, name, value, kind = DOORS[door]
    file = json_family.root / folder / name
    argv, values, failures = commands(json_family, kind), itertools.cycle(VALUES), list[Any]()
    with kept(file) as before:
        if value is None:
            value = {k: v[:1] if isinstance(v, list) else v for k, v in json.loads(before).items()}
        tries = [(place, to) for place in places(value) for to in itertools.islice(values, PER_KEY)]
        if name == "config.json":  # by one process for all, also as it is written without quantization
            hostile = [changed(value, place, to) for place, to in tries if place]
            written = [{k: v for k, v in c.items() if k != "quantization_config"} for c in hostile]
            read_configs([*hostile, *written])
        for place, to in tries:
            file.write_text(json.dumps(changed(value, place, to)))
            done = actmat(argv)
            if done.code not in (0, 1) or "Traceback" in done.err:
                failures.append((place, str(to)[:40], done.code, done.err[:300]))
    assert not failures, failures[:5]


TEXTS = ("[1]", "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, '{"r": ' + "9" * 5000 + "}")


@pytest.mark.parametrize("door", [d for d in DOORS if not d.startswith(("tokenizer", "generation", "adapter on"))])
def test_a_text_that_is_not_read_is_refused(json_family: Family, door: str) -> None:
    folder, name, _, kind = DOORS[door]
    file = json_family.root / folder / name
    with kept(file):
        for text in TEXTS:
            file.write_text(text)
            done = actmat(commands(json_family, kind), code=1)
            assert file.name in done.err
