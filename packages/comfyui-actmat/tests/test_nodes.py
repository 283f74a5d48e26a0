"""The nodes in stand-ins of ComfyUI: merged, applied, saved, cached, interrupted, and refused with a reason."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tolerances import F32_ELEMENTWISE

from actmat.errors import MergeError

PACKAGE = Path(__file__).parents[1]
UNET, TEXT = "lora_unet_mid_block_attentions_0_proj_in", "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
SIZE = 24
CONTRACT = {"method": "task_arithmetic", "scale": 1.0, "options": "scaling=1"}


def save_lora(
    file: Path, seed: int, rank: int = 4, alpha: float = 2.0, modules: tuple[str, ...] = (UNET, TEXT)
) -> None:
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for m in (UNET, TEXT):
        tensors[f"{m}.lora_down.weight"] = torch.randn((rank, SIZE), generator=rng)
        tensors[f"{m}.lora_up.weight"] = torch.randn((SIZE, rank), generator=rng)
        tensors[f"{m}.alpha"] = torch.tensor(alpha)
    save_file(tensors, file)


def delta(file: Path, module: str) -> torch.Tensor:
    stored = load_file(file)
    down, up = stored[f"{module}.lora_down.weight"].double(), stored[f"{module}.lora_up.weight"].double()
    return float(stored[f"{module}.alpha"]) / down.shape[0] * (up @ down)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def parts(comfy: Any) -> tuple[Any, Any]:
    """A model and a CLIP of zeros."""
    of = vars(sys.modules[type(comfy).__module__])["Part"]
    return of({UNET: torch.zeros(SIZE, SIZE).double()}), of({TEXT: torch.zeros(SIZE, SIZE).double()})


@pytest.fixture
def two(comfy: Any) -> Any:
    save_lora(comfy.folder("loras") / "ink.safetensors", 1)
    save_lora(comfy.folder("loras") / "oil.safetensors", 2, rank=2, alpha=2.0)
    return comfy


STACK = [("ink.safetensors", 0.8, 0.25), ("None", 1.0, 1.0), ("oil.safetensors", -0.5, 0.5)]


def test_a_stack_is_merged_exactly_and_applied(two: Any) -> None:
    stack = list(STACK)
    model, clip = parts(two)
    out = two.nodes.ActmatMergeLoras.execute(stack, rank=0, model=model, clip=clip, **CONTRACT)
    new_model, new_clip, job, summary = out.args
    ink, oil = (two.folder("loras") / f"{n}.safetensors" for n in ("ink", "oil"))
    assert error(new_model.weights[UNET], 0.8 * delta(ink, UNET) - 0.5 * delta(oil, UNET)) < F32_ELEMENTWISE
    assert error(new_clip.weights[TEXT], 0.25 * delta(ink, TEXT) + 0.5 * delta(oil, TEXT)) < F32_ELEMENTWISE
    assert stack == STACK, "other nodes have the same list"
    assert not model.weights[UNET].any(), "the given model is left as it is"
    assert [x.name for x in job.loras] == ["ink.safetensors", "oil.safetensors"]
    assert "applied: 2 modules, all" in summary
    assert two.steps[-1] == (2, 2)
    assert [p for p in (two.root / "temp" / "actmat").iterdir() if "inputs" in p.name] == []


def test_blocks_are_factors_of_the_strengths(two: Any) -> None:
    model, clip = parts(two)
    rows: Any = None
    for name, strengths, blocks in (("ink", (0.8, 0.25), "MID=0.5, BASE=2"), ("oil", (-0.5, 0.5), " ")):
        (rows,) = two.nodes.ActmatLoraStack.execute(f"{name}.safetensors", *strengths, rows, blocks.strip()).args
    assert [len(row) for row in rows] == [4, 3], "other packs read rows of three"
    new_model, new_clip, _, summary = two.nodes.ActmatMergeLoras.execute(rows, rank=0, model=model, clip=clip,
                                                                         **CONTRACT).args  # fmt: skip
    ink, oil = (two.folder("loras") / f"{n}.safetensors" for n in ("ink", "oil"))
    assert error(new_model.weights[UNET], 0.4 * delta(ink, UNET) - 0.5 * delta(oil, UNET)) < F32_ELEMENTWISE
    assert error(new_clip.weights[TEXT], 0.5 * delta(ink, TEXT) + 0.5 * delta(oil, TEXT)) < F32_ELEMENTWISE
    assert "ink.safetensors 0.8/0.25 MID=0.5, BASE=2" in summary


def test_a_method_without_weights_takes_strengths_as_scale(two: Any) -> None:
    model, _ = parts(two)
    found = two.nodes.ActmatMergeLoras.execute(STACK, "dc_merge", 1.0, 0, model=model)
    assert found.args[0].weights[UNET].any()
    assert found.args[1] is None


def test_strength_zero_of_clip_leaves_its_modules_out(two: Any) -> None:
    model, clip = parts(two)
    stack = [("ink.safetensors", 1.0, 0.0)]
    out = two.nodes.ActmatMergeLoras.execute(stack, rank=0, model=model, clip=clip, **CONTRACT)
    assert error(out.args[0].weights[UNET], delta(two.folder("loras") / "ink.safetensors", UNET)) < F32_ELEMENTWISE
    assert not out.args[1].weights[TEXT].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, F32_ELEMENTWISE), (torch.float16, 2**-11)])
def test_a_file_without_alpha_is_scaled_as_well(comfy: Any, dtype: torch.dtype, tolerance: float) -> None:
    name = "unet.mid_block.attentions.0.proj_in"
    rng = torch.Generator().manual_seed(5)
    a, b = torch.randn((3, SIZE), generator=rng).to(dtype), torch.randn((SIZE, 3), generator=rng).to(dtype)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, comfy.folder("loras") / "d.safetensors")
    job = comfy.nodes._job([("d.safetensors", 0.3, 1.0)], comfy.nodes._settings("task_arithmetic", 1.0, "scaling=1"))
    file = comfy.nodes.merged.get(job, "same", comfy.host.ComfyProgress()).file
    stored = load_file(file)
    found = stored[f"{name}.lora_B.weight"].double() @ stored[f"{name}.lora_A.weight"].double()
    assert error(found, 0.3 * (b.double() @ a.double())) < tolerance  # the merged file has the dtype of its inputs


def test_a_merge_is_kept_by_the_contents_of_its_files(two: Any) -> None:
    def run(**changed: Any) -> Path:
        args = {"rank": 0} | CONTRACT | changed
        job = two.nodes.ActmatMergeLoras.execute(STACK, **args).args[2]
        file: Path = two.nodes.merged.get(job, "same", two.host.ComfyProgress()).file
        return file

    first, steps = run(), len(two.steps)
    assert run() == first
    assert len(two.steps) == steps, "nothing was merged again"
    before = two.nodes.ActmatMergeLoras.fingerprint_inputs()
    assert two.nodes.ActmatMergeLoras.fingerprint_inputs() == before
    assert len({first, run(scale=0.5), run(rank=1), run(options="scaling=0.9")}) == 4
    save_lora(two.folder("loras") / "ink.safetensors", 3)
    assert two.nodes.ActmatMergeLoras.fingerprint_inputs() == before + 1
    assert run() != first
    for k in range(two.jobs.KEPT):
        run(scale=2.0 + k)
    assert len(list((two.root / "temp" / "actmat").iterdir())) == two.jobs.KEPT
    assert not first.exists()


@pytest.mark.parametrize("kind", ["Interrupted", "NewInterrupted"])
def test_an_interrupted_merge_goes_on(two: Any, kind: str) -> None:
    two.interruption = vars(sys.modules[type(two).__module__])[kind]
    two.interrupt_at = 1  # after the step that stands for what was taken over
    args = {"rank": 0} | CONTRACT
    with pytest.raises(two.interruption):  # ComfyUI knows its own exception only
        two.nodes.ActmatMergeLoras.execute(STACK, **args)
    model, _ = parts(two)
    assert two.nodes.ActmatMergeLoras.execute(STACK, model=model, **args).args[0].weights[UNET].any()


@pytest.mark.parametrize("layout", ["same", "kohya", "diffusers"])
def test_a_merged_lora_is_saved_and_overwrites_nothing(two: Any, layout: str) -> None:
    job = two.nodes.ActmatMergeLoras.execute(STACK, rank=0, **CONTRACT).args[2]
    saved = [two.nodes.ActmatSaveLora.execute(job, "merged/x", layout) for _ in range(2)]
    assert [s.args[0] for s in saved] == ["merged/x_00001_.safetensors", "merged/x_00002_.safetensors"]
    file = Path(saved[0].args[1])
    names = set(load_file(file))
    assert (f"{UNET}.alpha" in names) == (layout != "diffusers")
    assert any(n.startswith("text_encoder.") for n in names) == (layout == "diffusers")
    assert "saved merged/x_00001_" in saved[0].ui.as_dict()["text"][0]
    record = json.loads(file.with_suffix(".actmat.json").read_text())
    assert [(x["model"], x["clip"]) for x in record["inputs"]["loras"]] == [(0.8, 0.25), (-0.5, 0.5)]
    assert record["manifest"]["recipe"]["method"] == "task_arithmetic"
    with pytest.raises(Exception, match="outside"):
        two.nodes.ActmatSaveLora.execute(job, "../../x", layout)


def test_an_empty_stack_changes_nothing_and_cannot_be_saved(two: Any) -> None:
    model, clip = parts(two)
    out = two.nodes.ActmatMergeLoras.execute([("ink.safetensors", 0.0, 0.0)], rank=0, model=model,
                                             clip=clip, **CONTRACT)  # fmt: skip
    assert out.args[:2] == (model, clip)
    assert "unchanged" in out.args[3]
    with pytest.raises(MergeError, match="nothing to merge"):
        two.nodes.ActmatSaveLora.execute(out.args[2], "x", "same")


def test_a_lora_of_another_model_is_refused(two: Any) -> None:
    model, _ = parts(two)
    model.weights = {"lora_unet_other": torch.zeros(2, 2)}
    with pytest.raises(MergeError, match="accepts no module of the merged LoRA"):
        two.nodes.ActmatMergeLoras.execute(STACK, rank=0, model=model, **CONTRACT)


def test_names_that_comfyui_does_not_know_are_translated(comfy: Any) -> None:
    rng = torch.Generator().manual_seed(5)
    a, b = torch.randn((3, 320), generator=rng), torch.randn((320, 3), generator=rng)
    stored = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file({f"{stored}.lora_A.weight": a, f"{stored}.lora_B.weight": b}, comfy.folder("loras") / "d.safetensors")
    model, _ = parts(comfy)
    name = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    model.weights = {name: torch.zeros(320, 320).double()}
    out = comfy.nodes.ActmatMergeLoras.execute([("d.safetensors", 0.5, 1.0)], rank=0, model=model,
                                               **CONTRACT)  # fmt: skip
    assert error(out.args[0].weights[name], 0.5 * (b.double() @ a.double())) < F32_ELEMENTWISE
    assert "applied with ComfyUI's names; its loader does not know 1" in out.args[3]
    saved = comfy.nodes.ActmatSaveLora.execute(out.args[2], "x", "comfy")
    assert f"{name}.alpha" in load_file(saved.args[1])


def test_a_layout_without_names_for_the_modules_is_refused(two: Any) -> None:
    for name in ("ink", "oil"):
        file = two.folder("loras") / f"{name}.safetensors"
        save_file({n.replace(UNET, "lora_unet_glow_knot"): t for n, t in load_file(file).items()}, file)
    job = two.nodes.ActmatMergeLoras.execute(STACK, rank=0, **CONTRACT).args[2]
    with pytest.raises(MergeError, match="lora_unet_glow_knot"):
        two.nodes.ActmatSaveLora.execute(job, "x", "diffusers")


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        ("ink", "expects a list"),
        ([("ink.safetensors", 1.0)], "row 1: expected"),
        ([("gone.safetensors", 1.0, 1.0)], "finds no LoRA file 'gone.safetensors'"),
        ([("ink.safetensors", 1.0, 1.0, "0,0,1")], "found 3 values, expected 12, 17"),
        ([("ink.safetensors", 1.0, 1.0, 0.5)], "expected a text with factors of blocks"),
        ([("ink.safetensors", float("nan"), 1.0)], "finite"),
        ([("ink.safetensors", "strong", 1.0)], "expected two numbers"),
    ],
)
def test_wrong_stacks_are_refused_by_row(two: Any, stack: Any, message: str) -> None:
    with pytest.raises(MergeError, match=message):
        two.nodes.ActmatMergeLoras.execute(stack, rank=0, **CONTRACT)


@pytest.mark.parametrize("text", ["density", "=3", "a=1\na=2"])
def test_wrong_options_are_refused(two: Any, text: str) -> None:
    with pytest.raises(MergeError, match="one name=value per line"):
        two.nodes.ActmatMergeLoras.execute(STACK, "ties", 1.0, 0, options=text)


def test_the_stack_node_appends(two: Any) -> None:
    node, given = two.nodes.ActmatLoraStack, [("oil.safetensors", 1.0, 1.0)]
    assert node.execute("ink.safetensors", 0.5, 0.4, given).args == ([*given, ("ink.safetensors", 0.5, 0.4)],)
    assert len(given) == 1
    before = node.fingerprint_inputs("ink.safetensors")
    save_lora(two.folder("loras") / "ink.safetensors", 9)
    assert node.fingerprint_inputs("ink.safetensors") != before


@pytest.mark.parametrize("only", [True, False])
def test_checkpoints_are_merged_into_a_file(comfy: Any, only: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    names = ("model.diffusion_model.middle_block.1.proj_in.weight", "first_stage_model.post_quant_conv.bias")
    stored = {}
    for k, name in enumerate(("base", "ink", "oil")):
        tensors = {names[0]: torch.randn((8, 8), generator=rng), names[1]: torch.randn(4, generator=rng)}
        stored[name] = {n: t + 0.1 * k for n, t in tensors.items()}
        save_file(stored[name], comfy.folder("checkpoints") / f"{name}.safetensors")
    stack, merge = comfy.nodes.ActmatCheckpointStack, comfy.nodes.ActmatMergeCheckpoints
    (experts,) = stack.execute("ink.safetensors", 1.0).args
    (experts,) = stack.execute("oil.safetensors", 1.0, experts, "MID=0.5, BASE=0.25").args
    before = merge.fingerprint_inputs("base.safetensors")
    out = merge.execute("base.safetensors", experts, "task_arithmetic", 1.0, only, "merged/c", "scaling=1")
    name, summary = out.args
    assert (name, comfy.find("checkpoints", name) is not None) == ("merged/c_00001_.safetensors", True)
    found = load_file(comfy.folder("checkpoints") / name)
    base, ink, oil = (stored[n][names[0]].double() for n in ("base", "ink", "oil"))
    assert error(found[names[0]].double(), ink - base + 0.5 * (oil - base) + base) < F32_ELEMENTWISE
    assert torch.equal(found[names[1]], stored["base"][names[1]]) == only
    assert "ink.safetensors 1 + oil.safetensors 1 MID=0.5, BASE=0.25" in summary
    assert (comfy.folder("checkpoints") / "merged/c_00001_.actmat.json").is_file()
    assert list((comfy.root / "temp" / "actmat").iterdir()) == [], "gigabytes are not left in the temporary folder"
    assert merge.fingerprint_inputs("base.safetensors") == before
    model, clip, vae = comfy.nodes.ActmatLoadCheckpoint.execute(name).args
    assert (set(model), clip, vae) == (set(found), "clip", "vae")
    with pytest.raises(MergeError, match="no checkpoint 'gone'"):
        stack.execute("gone", 1.0)


def test_a_file_is_published_across_file_systems(comfy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    source.write_bytes(b"weights")

    def other_device(a: Path, b: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", other_device)
    comfy.jobs.publish(source, target, keep=False)
    assert target.read_bytes() == b"weights"
    assert sorted(p.name for p in tmp_path.glob("*.part")) == []


def load_as_comfyui() -> Any:
    """The package as ComfyUI imports a folder of custom_nodes: under a name of its own."""
    spec = importlib.util.spec_from_file_location("custom_nodes_x_comfyui-actmat", PACKAGE / "__init__.py",
                                                  submodule_search_locations=[str(PACKAGE)])  # fmt: skip
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_comfyui_finds_all_nodes(comfy: Any) -> None:
    extension = asyncio.run(load_as_comfyui().comfy_entrypoint())
    found = [node.define_schema() for node in asyncio.run(extension.get_node_list())]
    assert len({s.node_id for s in found}) == 6
    assert all(s.node_id.startswith("Actmat") and s.description and s.category == "actmat" for s in found)
    methods = {s.node_id: next((i.about["options"] for i in s.inputs if i.id == "method"), []) for s in found}
    assert {"auto", "task_arithmetic", "tsv", "ties"} <= set(methods["ActmatMergeLoras"])
    assert "slerp" not in methods["ActmatMergeLoras"], "it needs a base"
    assert "slerp" in methods["ActmatMergeCheckpoints"]
    assert "regmean" not in methods["ActmatMergeCheckpoints"], "it needs data"


def test_without_actmat_the_log_says_what_to_install(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_as_comfyui()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install -r requirements\.txt"):
        asyncio.run(module.comfy_entrypoint())


def test_torch_stays_the_hosts() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    wanted = (PACKAGE / "requirements.txt").read_text().split()
    assert project["project"]["dependencies"] == wanted == ["actmat>=0.1.0"]
    assert {"PublisherId", "DisplayName"} <= set(project["tool"]["comfy"])


def test_the_example_workflow_fits_the_nodes(comfy: Any) -> None:
    schemas = {n.define_schema().node_id: n.define_schema() for n in vars(comfy.nodes).values()
               if hasattr(n, "define_schema")}  # fmt: skip
    (file,) = (PACKAGE / "example_workflows").glob("*.json")
    flow = json.loads(file.read_text())
    nodes = {n["id"]: n for n in flow["nodes"]}
    own = [n for n in flow["nodes"] if n["type"].startswith("Actmat")]
    assert {"ActmatLoraStack", "ActmatMergeLoras", "ActmatSaveLora"} <= {n["type"] for n in own}
    for node in own:
        schema = schemas[node["type"]]
        sockets = [i for i in schema.inputs if i.io_type not in ("COMBO", "FLOAT", "INT", "STRING", "BOOLEAN")]
        required = [i for i in schema.inputs if not i.about.get("optional")]
        ordered = [*required, *(i for i in schema.inputs if i.about.get("optional"))]
        assert {(i["name"], i["type"]) for i in node["inputs"]} == {(i.id, i.io_type) for i in sockets}
        assert [o["type"] for o in node["outputs"]] == [o.io_type for o in schema.outputs]
        assert len(node["widgets_values"]) == len([i for i in ordered if i not in sockets])
    for number, start, out, end, into, kind in flow["links"]:
        ends = {nodes[start]["outputs"][out]["type"], nodes[end]["inputs"][into]["type"], kind} - {"*"}
        assert len(ends) == 1
        assert number in nodes[start]["outputs"][out]["links"]
        assert nodes[end]["inputs"][into]["link"] == number


def test_names_in_texts_are_those_of_the_nodes(comfy: Any) -> None:
    page = (PACKAGE / "README.md").read_text()
    shown = {n.define_schema().display_name for n in vars(comfy.nodes).values() if hasattr(n, "define_schema")}
    assert shown == set(re.findall(r"\*\*([^*]+ \(actmat\))\*\*", page))
