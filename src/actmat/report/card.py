"""The model card: `README.md` of a merged model, with the metadata that hubs read."""

from __future__ import annotations

import re
from typing import Any

import yaml

from actmat.checkpoints.layer_names import stack_parts
from actmat.foreign import markdown
from actmat.methods import get_method
from actmat.plan.model import MergePlan, count_actions
from actmat.recipe import Recipe
from actmat.recipe.load import recipe_yaml
from actmat.recipe.values import shown_value

__all__ = ["model_card"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_card(plan: MergePlan) -> str:
    """Markdown with a YAML head: `base_model`, `tags: [merge]`, the recipe, what was done."""
    recipe, is_adapter = plan.recipe, plan.output == "adapter"
    head, title, table, done = _of_adapter(plan) if is_adapter else _of_model(plan)
    method = get_method(recipe.method)
    about = f"{method.summary}\n\n    {method.equation}\n\nReference: {method.reference}."
    if not recipe.experts:
        about = "Layers of models, one after the other, copied as they are."
    thing, with_what = (
        ("module", "with norms and the error of the\ntruncation; `actmat verify` checks the hashes.")
        if is_adapter
        else ("tensor", "with hashes of all inputs and of the\noutput; `actmat verify` checks them.")
    )
    made = f"Made with actmat {plan.versions['actmat']}."
    recipe_title = "" if is_adapter else "## Recipe\n\n"
    written = recipe_yaml(recipe).strip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", written)), default=0))  # a path cannot close the block
    return f"""---
{yaml.safe_dump(head, sort_keys=False).strip()}
---

# {title}

{about}

{table}

{done}

{recipe_title}{fence}yaml
{written}
{fence}

`actmat_manifest.json` tells for every {thing} what was done and why, {with_what} {made}
"""


def _of_model(plan: MergePlan) -> tuple[dict[str, Any], str, str, str]:
    """Metadata, title, table of inputs, and a sentence on what was done."""
    recipe = plan.recipe
    inputs = [recipe.base, *(e.path for e in recipe.experts)]
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["merge", "actmat"]}
    inputs = [p.location for i in inputs for p in stack_parts(i)] + [i for i in inputs if not stack_parts(i)]
    hub_ids = [i.partition("@")[0] for i in dict.fromkeys(inputs) if _HUB_ID.fullmatch(i.partition("@")[0])]
    if hub_ids:
        head = {"base_model": hub_ids, "base_model_relation": "merge"} | head
    words = {
        "merge": f"merged with `{recipe.method}`" if not recipe.rules else "merged by the rules of the recipe",
        "average": "averaged (mean of the deltas)",
        "copy": "copied from the base",
        "tie": "tied to another tensor",
    }
    table = f"| | checkpoint | weight |\n|---|---|---|\n| base | {markdown(recipe.base)} | |\n{_expert_rows(recipe)}"
    done = "Tensors: " + ", ".join(f"{n} {words[a]}" for a, n in count_actions(plan.items).items() if n) + "."
    if not recipe.experts:
        return head, "Stack of layers", table, done
    return head, f"Merge of {len(recipe.experts)} experts with {markdown(recipe.method)}", table, done


def _of_adapter(plan: MergePlan) -> tuple[dict[str, Any], str, str, str]:
    recipe = plan.recipe
    head: dict[str, Any] = {"library_name": "diffusers", "tags": ["merge", "actmat", "lora"]}
    if plan.adapter_config is not None:
        head = {"base_model": plan.adapter_config["base_model_name_or_path"]} | head | {"library_name": "peft"}
    table = f"| adapter | from | weight |\n|---|---|---|\n{_expert_rows(recipe)}"
    top = max((m.pair.rank for m in plan.modules), default=0)
    done = f"{len(plan.modules)} modules of rank up to {top}, scaling 1."
    return head, f"Merge of {len(recipe.experts)} adapters with {markdown(recipe.method)}", table, done


def _expert_rows(recipe: Recipe) -> str:
    return "\n".join(f"| {markdown(e.label)} | {markdown(e.path)} | {shown_value(e.weight)} |" for e in recipe.experts)
