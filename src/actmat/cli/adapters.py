"""Contents of an adapter, as plain data and on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["describe_adapter", "print_adapter"]


def describe_adapter(location: str) -> dict[str, Any]:
    """Contents of an adapter as plain data, problems included."""
    from actmat.experts.resolve import open_adapter

    with open_adapter(location) as adapter:
        modules = [
            {
                "name": m.name,
                "kind": m.kind,
                "shape": list(m.shape),
                "rank": m.rank,
                "scaling": m.scaling,
                "bias": m.bias is not None,
            }
            for m in adapter.modules.values()
        ]
        specs = adapter.weights.specs
        return {
            "location": location,
            "adapter": "list of factor pairs" if adapter.is_pair_list else "lora",
            "base_model": adapter.config.base_model,
            "use_rslora": adapter.config.use_rslora,
            "fan_in_fan_out": adapter.config.fan_in_fan_out,
            "modules": modules,
            "full_tensors": {n: list(specs[s].shape) for n, s in adapter.extras.items()},
            "base_copies": list(adapter.copies),
            "parameters": sum(s.numel for s in specs.values()),
            "bytes": sum(s.nbytes for s in specs.values()),
            "dtypes": dict(Counter(s.dtype for s in specs.values())),
            "problems": list(adapter.problems),
        }


def print_adapter(data: Mapping[str, Any], *, every: bool) -> None:
    """The description of an adapter for a reader."""
    from rich.markup import escape
    from rich.table import Table

    from actmat.cli.screen import console
    from actmat.errors import format_size as size

    place = f"[bold]{escape(data['location'])}[/bold]"
    if data["adapter"] == "lora":
        console.print(f"{place}: LoRA adapter of {escape(data['base_model'] or 'an unnamed base')}")
    else:
        console.print(
            f"{place}: a list of {len(data['modules'])} (up, down) pairs without names, alpha or config. Modules are "
            "called by their place in the list, the scaling is taken as 1. PEFT cannot load it"
        )
    console.print(f"{data['parameters']:,} parameters, {size(data['bytes'])}, " + ", ".join(data["dtypes"]))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("modules", "kind", "rank", "scaling", "O x I", "which"):
        table.add_column(column, overflow="fold")
    groups: dict[tuple[Any, ...], list[str]] = {}
    for m in data["modules"]:
        key = (m["kind"], m["rank"], f"{m['scaling']:g}", "x".join(map(str, m["shape"])))
        groups.setdefault(key if not every else (*key, m["name"]), []).append(m["name"])
    for key, names in groups.items():
        shown = names[0] + (f" ... {names[-1]}" if len(names) > 1 else "")
        table.add_row(str(len(names)), *map(str, key[:4]), escape(shown))
    console.print(table)
    for name, shape in data["full_tensors"].items():
        console.print(f"trained in full: {name} {'x'.join(map(str, shape))}", markup=False)
    for problem in data["problems"]:
        console.print(f"[red]problem[/red]: {escape(problem)}")
