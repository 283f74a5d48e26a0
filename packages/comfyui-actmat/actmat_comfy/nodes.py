"""The nodes, for ComfyUI's node API of 2025 (`comfy_api.latest`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import ComfyExtension, io, ui

from actmat.errors import MergeError
from actmat.methods import all_methods

from . import host, jobs
from .files import Watched, stamp
from .stacks import Expert, read_loras, read_options

CATEGORY = "actmat"
LoraStack = io.Custom("LORA_STACK")
MergedLora = io.Custom("ACTMAT_LORA")
Experts = io.Custom("ACTMAT_EXPERTS")

watched = Watched()
merged = jobs.MergedLoras(host.temporary_folder)

_STRENGTH = {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.01}
_BLOCKS = "Factors of blocks, such as IN00-05=0.2, MID=0.5, OUT=0.8, or 12, 17, 20, 26 or 61 values. Empty: 1."
_OPTIONS = "Options of the method, one name=value per line, such as density=0.3. Empty: defaults."


def methods(*, of_adapters: bool) -> list[str]:
    """Names of methods that need no data, and for adapters also no base."""
    found = [m for m in all_methods() if not m.needs_statistics]
    if of_adapters:
        found = [m for m in found if not m.uses_base(m.resolve_options({}))]
    return ["auto", *(m.name for m in found)]


def _method_inputs(*, of_adapters: bool) -> list[Any]:
    about = "auto: LoRA files add up at their strengths; checkpoints: by measurements, none of them of image models."
    return [
        io.Combo.Input("method", options=methods(of_adapters=of_adapters), default="auto", tooltip=about),
        io.Float.Input("scale", **_STRENGTH, tooltip="Factor of the merged change, for model and CLIP."),
    ]


def _blocks_input() -> Any:
    return io.String.Input("blocks", default="", optional=True, tooltip=_BLOCKS)


def _options_input() -> Any:
    return io.String.Input("options", default="", multiline=True, optional=True, tooltip=_OPTIONS)


def _settings(method: str, scale: float, options: str | None) -> dict[str, Any]:
    return {"method": method, "scale": scale, "options": read_options(options or "")}


def _job(stack: Any, settings: dict[str, Any], rank: int = 0) -> jobs.LoraJob:
    job = jobs.LoraJob(read_loras(stack, host.find_lora), settings, rank)
    watched.add(lora.file for lora in job.loras)
    return job


def _in_comfy_names(job: jobs.LoraJob, model: Any, clip: Any, fit: host.Fit) -> tuple[host.Fit, str]:
    """Convert the merged LoRA to ComfyUI's names if its loader then accepts more modules; also returns a note."""
    try:
        found = merged.get(job, "comfy", host.ComfyProgress())
    except MergeError as error:
        return fit, f"note: not convertible to ComfyUI's names: {error}"
    other = host.fit_lora(model, clip, found.file)
    if len(other.left) >= len(fit.left):
        return fit, ""
    return other, f"note: applied with ComfyUI's names; its loader does not know {len(fit.left)} names of the files"


class ActmatLoraStack(io.ComfyNode):  # type: ignore[misc]  # ComfyUI is not there when types are checked
    """Node that adds a LoRA file to a stack."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare inputs and outputs."""
        return io.Schema(
            node_id="ActmatLoraStack",
            display_name="LoRA Stack (actmat)",
            category=CATEGORY,
            description="Adds a LoRA file to a stack. Also accepts stacks of other node packs (LORA_STACK).",
            inputs=[
                io.Combo.Input("lora_name", options=folder_paths.get_filename_list("loras")),
                io.Float.Input("strength_model", **_STRENGTH),
                io.Float.Input("strength_clip", **_STRENGTH),
                LoraStack.Input("lora_stack", optional=True),
                _blocks_input(),
            ],
            outputs=[LoraStack.Output("stack", display_name="LORA_STACK")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **others: Any) -> str:
        """State of the file."""
        return repr(stamp(Path(host.find_lora(lora_name) or "")))

    @classmethod
    def execute(
        cls,
        lora_name: str,
        strength_model: float,
        strength_clip: float,
        lora_stack: Any = None,
        blocks: str | None = "",
    ) -> Any:
        """Return a new stack with the file; other node packs read rows of three values."""
        row = (lora_name, strength_model, strength_clip, *([blocks] if blocks else []))
        return io.NodeOutput([*(lora_stack or ()), row])


class ActmatMergeLoras(io.ComfyNode):  # type: ignore[misc]
    """Node that merges a stack of LoRA files and applies the result."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare inputs and outputs."""
        return io.Schema(
            node_id="ActmatMergeLoras",
            display_name="Merge LoRAs (actmat)",
            category=CATEGORY,
            description="Merges the LoRA files of a stack into one and applies it to model and CLIP, if connected.",
            inputs=[
                LoraStack.Input("lora_stack"),
                *_method_inputs(of_adapters=True),
                io.Int.Input("rank", default=0, min=0, max=4096, tooltip="Rank of the merged LoRA; 0: exact."),
                io.Model.Input("model", optional=True),
                io.Clip.Input("clip", optional=True),
                _options_input(),
            ],
            outputs=[
                io.Model.Output("merged_model", display_name="MODEL"),
                io.Clip.Output("merged_clip", display_name="CLIP"),
                MergedLora.Output("merged_lora", display_name="merged LoRA"),
                io.String.Output("summary", display_name="summary"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> int:
        """A number that increases when one of the merged files has changed."""
        return watched.number()

    @classmethod
    def execute(
        cls, lora_stack: Any, method: str, scale: float, rank: int, model: Any = None, clip: Any = None,
        options: str | None = "",
    ) -> Any:  # fmt: skip
        """Merge, or reuse the merged file of an earlier run, and apply it."""
        job = _job(lora_stack, _settings(method, scale, options), rank)
        if not job.loras:
            return io.NodeOutput(model, clip, job, "No LoRA in the stack: model and CLIP are unchanged.")
        found = merged.get(job, "same", host.ComfyProgress())
        if model is None and clip is None:
            return io.NodeOutput(None, None, job, found.summary)
        fit = host.fit_lora(model, clip, found.file)
        note = ""
        if fit.left:  # such as diffusers' names of attention layers
            fit, note = _in_comfy_names(job, model, clip, fit)
        model, clip = host.apply_lora(model, clip, fit)
        summary = "\n".join(line for line in (found.summary, note, fit.text) if line)
        return io.NodeOutput(model, clip, job, summary)


class ActmatSaveLora(io.ComfyNode):  # type: ignore[misc]
    """Node that writes a merged LoRA to ComfyUI's LoRA folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare inputs and outputs."""
        return io.Schema(
            node_id="ActmatSaveLora",
            display_name="Save merged LoRA (actmat)",
            category=CATEGORY,
            description="Writes the merged LoRA and a record of the merge to models/loras. Never overwrites a file.",
            is_output_node=True,
            inputs=[
                MergedLora.Input("merged_lora"),
                io.String.Input("filename_prefix", default="merged/actmat"),
                io.Combo.Input("layout", options=list(jobs.LAYOUTS), default="same", tooltip="Names of the tensors."),
            ],
            outputs=[
                io.String.Output("lora_name", display_name="lora_name"),
                io.String.Output("path", display_name="path"),
            ],
        )

    @classmethod
    def execute(cls, merged_lora: jobs.LoraJob, filename_prefix: str, layout: str) -> Any:
        """Merge in the requested layout and copy the file."""
        found = merged.get(merged_lora, layout, host.ComfyProgress())
        target, name = host.new_file("loras", filename_prefix)
        jobs.publish(found.file, target, keep=True)
        jobs.write_record(target.with_suffix(".actmat.json"), merged_lora, found.manifest)
        return io.NodeOutput(name, str(target), ui=ui.PreviewText(f"saved {name}\n{found.summary}"))


class ActmatCheckpointStack(io.ComfyNode):  # type: ignore[misc]
    """Node that adds a fine-tuned checkpoint to the experts of a merge."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare inputs and outputs."""
        return io.Schema(
            node_id="ActmatCheckpointStack",
            display_name="Checkpoint Stack (actmat)",
            category=CATEGORY,
            description="Adds a fine-tuned checkpoint to the experts of a merge.",
            inputs=[
                io.Combo.Input("ckpt_name", options=folder_paths.get_filename_list("checkpoints")),
                io.Float.Input("weight", **_STRENGTH, tooltip="For methods that take weights; 1: no weight is given."),
                Experts.Input("experts", optional=True),
                _blocks_input(),
            ],
            outputs=[Experts.Output("all_experts", display_name="experts")],
        )

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str, **others: Any) -> str:
        """Size and time of the file, because hashing gigabytes would take longer than a merge."""
        return repr(stamp(host.find_checkpoint(ckpt_name)))

    @classmethod
    def execute(cls, ckpt_name: str, weight: float, experts: Any = None, blocks: str | None = "") -> Any:
        """Return the experts with the new one."""
        expert = Expert(ckpt_name, host.find_checkpoint(ckpt_name), weight, (blocks or "").strip())
        return io.NodeOutput((*(experts or ()), expert))


class ActmatMergeCheckpoints(io.ComfyNode):  # type: ignore[misc]
    """Node that merges checkpoints of one base into a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare inputs and outputs."""
        return io.Schema(
            node_id="ActmatMergeCheckpoints",
            display_name="Merge Checkpoints (actmat)",
            category=CATEGORY,
            description="Merges fine-tuned checkpoints of one base to a new file in models/checkpoints.",
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "base_name",
                    options=folder_paths.get_filename_list("checkpoints"),
                    tooltip="Checkpoint that all experts were fine-tuned from.",
                ),
                Experts.Input("experts"),
                *_method_inputs(of_adapters=False),
                io.Boolean.Input(
                    "only_diffusion_model",
                    default=True,
                    tooltip="Copy text encoders and VAE from the base; off: also merge them.",
                ),
                io.String.Input("filename_prefix", default="merged/actmat"),
                _options_input(),
            ],
            outputs=[
                io.String.Output("ckpt_name", display_name="ckpt_name"),
                io.String.Output("summary", display_name="summary"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, base_name: str, **others: Any) -> str:
        """Size and times of the base."""
        return repr(stamp(host.find_checkpoint(base_name)))

    @classmethod
    def execute(
        cls, base_name: str, experts: tuple[Expert, ...], method: str, scale: float, only_diffusion_model: bool,
        filename_prefix: str, options: str | None = "",
    ) -> Any:  # fmt: skip
        """Merge tensor by tensor from disk to disk; no whole checkpoint is in memory."""
        settings = _settings(method, scale, options)
        job = jobs.CheckpointJob(host.find_checkpoint(base_name), experts, settings, only_diffusion_model)
        out = host.temporary_folder() / job.key
        report = jobs.run_merge(out, host.ComfyProgress(), base=str(job.base), **job.fields())
        found = jobs.merged_file(out, report, [f"{e.name} {e.weight:g} {e.blocks}".strip() for e in experts])
        target, name = host.new_file("checkpoints", filename_prefix)
        jobs.publish(found.file, target, keep=False)
        jobs.write_record(target.with_suffix(".actmat.json"), job, found.manifest)
        shutil.rmtree(out, ignore_errors=True)
        return io.NodeOutput(name, found.summary, ui=ui.PreviewText(f"saved {name}\n{found.summary}"))


class ActmatLoadCheckpoint(io.ComfyNode):  # type: ignore[misc]
    """Node that loads a checkpoint by a connected name, which ComfyUI's own loader does not accept."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare inputs and outputs."""
        return io.Schema(
            node_id="ActmatLoadCheckpoint",
            display_name="Load merged Checkpoint (actmat)",
            category=CATEGORY,
            description="Loads the merged checkpoint with ComfyUI's own loader.",
            inputs=[io.String.Input("ckpt_name", force_input=True)],
            outputs=[
                io.Model.Output("model", display_name="MODEL"),
                io.Clip.Output("clip", display_name="CLIP"),
                io.Vae.Output("vae", display_name="VAE"),
            ],
        )

    @classmethod
    def execute(cls, ckpt_name: str) -> Any:
        """Return model, CLIP and VAE."""
        return io.NodeOutput(*host.load_checkpoint(host.find_checkpoint(ckpt_name)))


class ActmatExtension(ComfyExtension):  # type: ignore[misc]
    """All nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Classes of the nodes."""
        return [
            ActmatLoraStack,
            ActmatMergeLoras,
            ActmatSaveLora,
            ActmatCheckpointStack,
            ActmatMergeCheckpoints,
            ActmatLoadCheckpoint,
        ]
