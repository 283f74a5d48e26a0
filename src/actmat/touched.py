"""Finished work of a run whose inputs were touched since: kept if their content is what the journal says was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actmat.engine.content import content_hash
from actmat.engine.inputs import Inputs
from actmat.engine.task import Record
from actmat.errors import MergeError
from actmat.methods import get_method
from actmat.planning import MergePlan
from actmat.planning.model import Item, MethodCall

__all__ = ["has_same_inputs"]


def has_same_inputs(plan: MergePlan, journal: Mapping[str, Mapping[str, Any]], inputs: Inputs) -> bool:
    """True if everything that the journal's items were made from is as it was; reads their inputs again.

    False also where the journal does not tell: adapters that are merged into an adapter, and methods that look at the
    whole model before the first tensor.
    """
    from_adapters = plan.output == "adapter" and not plan.is_extracted
    if from_adapters or any(i.call is not None and _is_surveyed(i.call) for i in plan.items):
        return False
    try:
        return all(_is_same(plan.by_name.get(name), entry, inputs) for name, entry in journal.items())
    except (MergeError, OSError):  # the merge itself will say what cannot be read
        return False


def _is_surveyed(call: MethodCall) -> bool:
    survey = get_method(call.method).survey
    return survey is not None and survey.applies(call.options)


def _is_same(item: Item | None, entry: Mapping[str, Any], inputs: Inputs) -> bool:
    record = Record.from_json(entry)
    if item is None or record is None or inputs.base is None:
        return False
    if any(content_hash(inputs.base, name) != record.base_hash for name in (item.name, *item.aliases)):
        return False
    if item.call is None:
        return True
    if len(record.expert_hashes) != len(item.sources):
        return False
    for t, (expert, source) in enumerate(zip(inputs.experts, item.sources, strict=True)):
        if source is None:
            continue
        if source.kind == "stored":
            twins = item.twins[t] if t < len(item.twins) else ()
            found = {content_hash(expert, name) for name in (source.name, *twins)}
        else:
            found = {expert.content(source.name)}
        if found != {record.expert_hashes[t]}:
            return False
    return True
