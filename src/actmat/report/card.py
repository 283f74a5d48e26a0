"""The model card: `README.md` of a merged model, with the metadata that hubs read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from actmat.engine.inputs import Inputs
from actmat.errors import Note
from actmat.foreign import markdown
from actmat.methods import get_method
from actmat.planning.model import MergePlan, count_actions
from actmat.recipe.load import recipe_yaml
from actmat.recipe.values import format_value
from actmat.report.licenses import LicensedInput, origins_of, shared_license


def model_card(plan: MergePlan, inputs: Inputs, warnings: Sequence[Note] = ()) -> str:
    """Markdown with a YAML head: `base_model`, `license`, `tags: [merge]`, the recipe, what was done.

    Cards of the inputs are read, if they exist. `warnings` of the finished merge follow what was done.
    """
    recipe, is_adapter = plan.recipe, plan.output == "adapter"
    origins = origins_of(inputs)
    license, licenses = shared_license(origins)
    head, title, done = _of_adapter(plan) if is_adapter else _of_model(plan, origins)
    head |= {} if license is None else {"license": license}
    method = get_method(recipe.method)
    equation = "\n".join(f"    {line}" for line in method.text.equation.splitlines())
    about = f"{method.text.summary}\n\n{equation}\n\nSource: {method.text.source}"
    if not recipe.experts:
        about = "A stack of layers, copied unchanged from its models."
    thing, with_what = (
        ("module", "with norms and the error of the\ntruncation; `actmat verify` checks the hashes.")
        if is_adapter
        else ("tensor", "with hashes of all inputs and of the\noutput; `actmat verify` checks them.")
    )
    done += "".join(f"\n\n**W{str(warning)[1:]}.**" for warning in warnings)
    made = f"Made with actmat {plan.versions['actmat']}."
    written = recipe_yaml(recipe).strip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", written)), default=0))  # a path cannot close the block
    return f"""---
{yaml.safe_dump(head, sort_keys=False).strip()}
---

# {title}

{about}

{_inputs_table(plan)}

{done}

## License

{licenses}

## Recipe

{fence}yaml
{written}
{fence}

`actmat_manifest.json` tells for every {thing} what was done and why, {with_what} {made}
"""


def _of_model(plan: MergePlan, origins: Sequence[LicensedInput]) -> tuple[dict[str, Any], str, str]:
    """Metadata, title, and a sentence on the merge."""
    recipe = plan.recipe
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["merge", "actmat"]}
    hub_ids = list(dict.fromkeys(o.hub_id for o in origins if o.hub_id))
    if hub_ids:
        head = {"base_model": hub_ids, "base_model_relation": "merge"} | head
    words = {
        "merge": f"merged with `{recipe.method}`" if not recipe.rules else "merged by the rules of the recipe",
        "average": "averaged (mean of the deltas)",
        "copy": "copied from the base",
        "tie": "tied to another tensor",
    }
    done = "Tensors: " + ", ".join(f"{n} {words[a]}" for a, n in count_actions(plan.items).items() if n) + "."
    if not recipe.experts:
        return head, "Stack of layers", done
    return head, f"Merge of {len(recipe.experts)} experts with {markdown(recipe.method)}", done


def _of_adapter(plan: MergePlan) -> tuple[dict[str, Any], str, str]:
    recipe = plan.recipe
    head: dict[str, Any] = {"library_name": "diffusers", "tags": ["merge", "actmat", "lora"]}
    if plan.adapter_config is not None:
        base = {"base_model": plan.adapter_config["base_model_name_or_path"], "base_model_relation": "adapter"}
        head = base | head | {"library_name": "peft"}
    ranks = [m.write.rank for m in plan.modules]
    ranks += [i.write.rank for i in plan.items if i.outputs and i.write.kind == "svd"]
    done = f"{len(ranks)} modules of rank up to {max(ranks, default=0)}, scaling 1."
    if plan.is_extracted:
        title = f"Adapter extracted from {len(recipe.experts)} expert(s) merged with {markdown(recipe.method)}"
        return head, title, done
    return head, f"Merge of {len(recipe.experts)} adapters with {markdown(recipe.method)}", done


def _inputs_table(plan: MergePlan) -> str:
    base = [("base", plan.recipe.base, "")] if plan.base is not None else []
    rows = [*base, *((e.label, e.path, format_value(e.weight)) for e in plan.recipe.experts)]
    lines = (f"| {markdown(label)} | {markdown(path)} | {weight} |" for label, path, weight in rows)
    return "\n".join(("| | from | weight |", "|---|---|---|", *lines))
