"""Texts in the header of a merged file: those of the inputs that are still valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actmat.checkpoints.folder import shown
from actmat.checkpoints.model import Model
from actmat.errors import first_of
from actmat.experts.deltas import Deltas

_OUTDATED = ("format", "actmat", "total_", "sshs_", "modelspec.hash", "lora_adapter_metadata", "_quant", "quant")
"""Beginnings of keys that tell the bytes, the format or the codes of one file."""
_FUNCTION = ("config", "prediction_type", "architecture", "timestep_range", "v_pred", "ztsnr")
"""Ends of keys by which loaders choose the code or the settings of a model."""
_OF_ONE_FILE = ("ss_", "modelspec.", "sd_merge_")
"""Beginnings of keys that describe one file: title, author, training."""


def merged_metadata(base: Model, experts: Sequence[Deltas], labels: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The texts for a model merged into a base, and notes on those that its inputs contradict.

    A text that all full checkpoints have alike is kept. Of one that decides how the model is loaded, that of the
    experts is written where they agree, else the base's.
    """
    pairs = zip(labels, experts, strict=True)
    by_label = {label: _valid(e.model) for label, e in pairs if not e.needs_base}
    of_base = _valid(base)
    agreed: dict[str, str] = {}
    notes, dropped = [], []
    for key in dict.fromkeys(k for texts in (of_base, *by_label.values()) for k in texts):
        values = {texts.get(key) for texts in by_label.values()} or {of_base.get(key)}
        mine, (first, *more) = of_base.get(key), list(values)
        if not more and first is not None and (first == mine or key.endswith(_FUNCTION)):
            agreed[key] = first
        elif key.endswith(_FUNCTION) and mine is not None:
            agreed[key] = mine
        if values == {mine}:
            continue
        if key.endswith(_FUNCTION):
            label, other = next((n, texts.get(key)) for n, texts in by_label.items() if texts.get(key) != mine)
            written = "nothing" if key not in agreed else "the base's" if agreed[key] == mine else "the experts'"
            notes.append(
                f"header metadata '{key}' are {shown(other)} in expert '{label}' and {shown(mine)} in the base: "
                f"{written} is written"
            )
        elif not key.startswith(_OF_ONE_FILE):
            dropped.append(key)
    if dropped:
        notes.append(f"header metadata that the inputs do not have alike are not written: {first_of(dropped)}")
    return agreed, notes


def _valid(model: Model) -> Mapping[str, str]:
    return {key: text for key, text in model.folder.header.items() if not key.startswith(_OUTDATED)}
