"""Recognize the model that an adapter was trained on, by names, shapes and the metadata of its file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterLayout, AdapterModule
from actmat.extras.diffusion.architectures import ARCHITECTURES, ImageArchitecture, Text, text_names
from actmat.extras.diffusion.names import KOHYA_PREFIXES, component_of

_DENOISERS = ("", "unet", "transformer", "diffusion_model")
HINTS = ("modelspec.architecture", "ss_base_model_version")
"""Metadata keys that name a file's model."""
_OTHERS = re.compile(
    r"(?<![a-z])(flux[-._ ]?2|hunyuan|lumina|z[-._ ]?image|hidream|ltx|cosmos|mochi|cogvideo|pixart|sana|aura[-_ ]?flow"
    r"|kolors|stable[-_ ]cascade|anima|omnigen|framepack|chronoedit|ernie)(?!gine)"
)
"""Words of metadata that name models without a table of names here, though some share names with others."""


def models_of(adapter: Adapter, metadata: Mapping[str, str]) -> frozenset[str]:
    """Names of the models that an adapter may be of; empty if nothing tells."""
    if other := _other_model(adapter, metadata):
        return frozenset({other})
    if fitting := _fitting(adapter, metadata):
        return frozenset(a.name for a in fitting)
    of_denoiser = [m for m in adapter.modules.values() if is_denoiser(adapter, m)]
    is_known = any(original_of(a, adapter.layout, m) for a in ARCHITECTURES for m in of_denoiser)
    return frozenset({"another model"}) if of_denoiser and not is_known else frozenset()


def find_architecture(adapter: Adapter, metadata: Mapping[str, str]) -> tuple[ImageArchitecture | None, str]:
    """Find an adapter's architecture by names, widths and file metadata; else a problem.

    Returns None and no problem if the names match no supported architecture.
    """
    fitting, first = _fitting(adapter, metadata), next(iter(adapter.modules), "")
    if fitting and (other := _other_model(adapter, metadata)):
        return None, (
            f"its metadata or shapes are of the model '{other}', and its modules, such as '{first}', have known names "
            f"in other layouts for {' or '.join(a.name for a in fitting)} only. Fix: convert it with the program that "
            f"wrote it, or correct the metadata ({', '.join(HINTS)})"
        )
    if len(fitting) > 1 and ARCHITECTURES[0] in fitting and not _looks_like_xl(adapter):
        return ARCHITECTURES[0], ""
    if len(fitting) > 1:
        listed = " or ".join(a.name for a in fitting)
        return None, (
            f"its {len(adapter.modules)} modules, such as '{first}', may be of {listed}, whose names differ "
            f"in other layouts. Fix: name the model in the file's metadata ({HINTS[0]}, such as 'flux-1-dev/lora')"
        )
    return (fitting[0], "") if fitting else (None, "")


def _other_model(adapter: Adapter, metadata: Mapping[str, str]) -> str:
    """A model without a table of names here that metadata or shapes tell; may be empty.

    FLUX.2 has Flux's names and feed-forward layers of three times the width, with gates.
    """
    if (named := _OTHERS.search(_said(metadata))) is not None:
        return re.sub(r"[-._ ]", "", named[1])
    ratios = {"linear1": (9, 1), "linear2": (1, 4), "mlp.0": (6, 1), "mlp.2": (1, 3)}
    for module in adapter.modules.values():
        name = module.inside.replace("_", ".")
        end = next((e for e in ratios if name.endswith(e)), "") if re.match(r"(?:double|single)\.blocks", name) else ""
        if end and module.shape[0] * ratios[end][1] == module.shape[1] * ratios[end][0]:
            return "flux2"
    return ""


def _said(metadata: Mapping[str, str]) -> str:
    """Lower-case text of the metadata on the model."""
    return " ".join(str(metadata.get(key, "")) for key in HINTS).lower()


def _fitting(adapter: Adapter, metadata: Mapping[str, str]) -> list[ImageArchitecture]:
    """Architectures that have all modules, as far as widths and metadata tell them apart."""
    of_denoiser = [m for m in adapter.modules.values() if is_denoiser(adapter, m)]
    texts = [m for m in adapter.modules.values() if not is_denoiser(adapter, m)]
    fitting = [a for a in ARCHITECTURES if of_denoiser or texts]
    fitting = [a for a in fitting if all(original_of(a, adapter.layout, m) for m in of_denoiser)]
    fitting = [a for a in fitting if all(text_of(a, adapter.layout, m) is not None for m in texts)]
    said = _said(metadata)
    for keep in (
        lambda a: any(word in said for word in a.words),
        lambda a: a.widths & _widths(of_denoiser, a.component),
        lambda a: adapter.layout != "kohya" or all(m.name.startswith(tuple(t.kohya for t in a.texts)) for m in texts),
        lambda a: not a.kohya_is_diffusers or not _looks_like_xl(adapter),
    ):
        if len(fitting) > 1 and any(map(keep, fitting)):
            fitting = [a for a in fitting if keep(a)]
    return fitting


def is_denoiser(adapter: Adapter, module: AdapterModule) -> bool:
    """True for a module of the model that denoises, not of a text encoder."""
    return module.part in _DENOISERS and (bool(module.part) or "text" not in component_of(adapter.config.fields))


def _widths(modules: Sequence[AdapterModule], component: str) -> set[int]:
    """Input widths of the projections that distinguish models by size."""
    ends = ("attn2.to_k", "attn2_to_k") if component == "unet" else ("attn.to_q", "attn.add_q_proj", "attn.qkv",
            "img_attn_qkv", "block_attn_qkv", "attn_to_q")  # fmt: skip
    return {m.shape[-1] for m in modules if m.inside.endswith(ends)}


def _looks_like_xl(adapter: Adapter) -> bool:
    """True if there is a second text encoder, size conditioning, or an attention layer with several blocks."""
    names = " ".join(adapter.modules).replace("_", ".")
    return any(
        word in names
        for word in ("text.encoder.2", "lora.te1.", "clip.g", "label.emb", "add.embedding", "transformer.blocks.1.")
    )


def original_of(
    architecture: ImageArchitecture, layout: AdapterLayout, module: AdapterModule
) -> tuple[str, int] | None:
    """Original name of a denoiser module and its position among the parts (-1: all); None if unknown."""
    name = module.inside
    if layout in ("kohya", "comfy"):
        original = architecture.flat.get(name) if layout == "kohya" else name
        if original in architecture.originals:
            return str(original), -1
        name = architecture.flat_paths.get(name, "") if layout == "kohya" else ""
    return architecture.paths.get(name)


def text_of(architecture: ImageArchitecture, layout: AdapterLayout, module: AdapterModule) -> tuple[Text, str] | None:
    """Text encoder of a module, and its dotted name there; None if unknown."""
    part = module.part or "text_encoder"  # a PEFT folder holds one model
    for text in architecture.texts:
        known = {"kohya": KOHYA_PREFIXES[text.kohya], "comfy": text.comfy.rstrip(".")}.get(layout, text.component)
        if known == part:
            names = {n.replace(".", "_") if layout == "kohya" else n: n for n in text_names(is_t5=text.is_t5)}
            return (text, names[module.inside]) if module.inside in names else None
    return None
