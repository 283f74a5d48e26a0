"""The model card: `README.md` of a merged model, with the metadata that hubs read."""

from __future__ import annotations

import re
from typing import Any

import yaml

from actmat.methods import get_method
from actmat.plan.model import MergePlan, count_actions
from actmat.recipe.load import recipe_yaml

__all__ = ["model_card"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_card(plan: MergePlan) -> str:
    """Markdown with a YAML head: `base_model`, `tags: [merge]`, the recipe, what was done to the tensors."""
    recipe = plan.recipe
    inputs = [recipe.base, *(e.path for e in recipe.experts)]
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["merge", "actmat"]}
    hub_ids = [i.partition("@")[0] for i in inputs if _HUB_ID.fullmatch(i.partition("@")[0])]
    if hub_ids:
        head = {"base_model": hub_ids, "base_model_relation": "merge"} | head
    method = get_method(recipe.method)
    counts = count_actions(plan.tensors)
    done = {
        "merge": f"merged with `{recipe.method}`" if not recipe.rules else "merged by the rules of the recipe",
        "average": "averaged (mean of the deltas)",
        "copy": "copied from the base",
        "tie": "tied to another tensor",
    }
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        f"# Merge of {len(recipe.experts)} experts with {recipe.method}",
        "",
        f"{method.summary}",
        "",
        f"    {method.equation}",
        "",
        f"Reference: {method.reference}.",
        "",
        "| | checkpoint | weight |",
        "|---|---|---|",
        f"| base | {recipe.base} | |",
        *(f"| {e.label} | {e.path} | {e.weight:g} |" for e in recipe.experts),
        "",
        "Tensors: " + ", ".join(f"{n} {done[a]}" for a, n in counts.items() if n) + ".",
        "",
        "## Recipe",
        "",
        "```yaml",
        recipe_yaml(recipe).strip(),
        "```",
        "",
        "`actmat_manifest.json` tells for every tensor what was done and why, with hashes of all inputs and of the",
        f"output; `actmat verify` checks them. Made with actmat {plan.versions['actmat']}.",
        "",
    ]
    return "\n".join(lines)
