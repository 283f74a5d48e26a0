"""What the commands print about adapters: the plan of a merged one, its summary, the contents of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actmat.plan.adapter_model import AdapterPlan

__all__ = ["describe_adapter", "print_adapter", "print_plan", "print_summary"]


def print_plan(plan: AdapterPlan, *, every: bool) -> None:
    """Groups of modules with what happens to them and why."""
    from rich.markup import escape
    from rich.table import Table

    from actmat.cli.screen import console
    from actmat.errors import format_size as size

    console.print(f"[bold]{plan.recipe.method}[/bold] over {len(plan.experts)} adapters, into an adapter")
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("modules", justify="right")
    table.add_column("action")
    table.add_column("which, and why", overflow="fold")
    groups: dict[tuple[str, str], list[str]] = {}
    for item in plan.tensors:
        groups.setdefault((item.action, item.reason), []).append(item.name)
        if every:
            table.add_row("x".join(map(str, item.shape)), item.action, escape(f"{item.name}: {item.reason}"))
    if not every:
        for (action, reason), names in groups.items():
            shown = names[0] + (f" ... {names[-1]}" if len(names) > 1 else "")
            table.add_row(str(len(names)), action, f"{escape(reason)}\n[dim]{escape(shown)}[/dim]")
    for pattern in dict.fromkeys(plan.kept.values()):
        names = [n for n, p in plan.kept.items() if p == pattern]
        shown = names[0] + (f" ... {names[-1]}" if len(names) > 1 else "")
        why = f"kept by the recipe ('{pattern}'): no delta is written"
        table.add_row(str(len(names)), "keep", f"{escape(why)}\n[dim]{escape(shown)}[/dim]")
    console.print(table)
    ranks = Counter(m.rank for m in plan.modules)
    console.print(
        f"ranks written: {', '.join(f'{r} ({n} modules)' for r, n in sorted(ranks.items()))}; exact would be up to "
        f"{max((m.full_rank for m in plan.modules), default=0)}"
    )
    console.print(
        f"read {size(plan.read_bytes)}, write {size(plan.write_bytes)}; peak memory {size(plan.peak_bytes(1))} with "
        f"one worker, {size(plan.peak_bytes(2))} with two"
    )
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)


def print_summary(plan: AdapterPlan, manifest: Mapping[str, Any], out: Path, seconds: float) -> None:
    """Ranks, error of the truncation, norms."""
    from rich.markup import escape

    from actmat.cli.screen import console
    from actmat.errors import format_size as size

    stats = [m["stats"] for m in manifest["modules"] if "norm" in m["stats"]]
    console.print(
        f"[bold]{escape(str(out))}[/bold]  ({plan.recipe.method}; {len(plan.experts)} adapters into an adapter)"
    )
    console.print(
        f"  {len(plan.modules)} modules of rank {max((m.rank for m in plan.modules), default=0)}, {len(plan.extras)} "
        f"full tensors; relative error of the truncation {manifest['output']['relative_error']:.2e}"
    )
    if stats:
        merged = sum(s["norm"] ** 2 for s in stats) ** 0.5
        total = sum(s["sum_norm"] ** 2 for s in stats) ** 0.5
        experts = [sum(n**2 for n in ns) ** 0.5 for ns in zip(*(s["expert_norms"] for s in stats), strict=True)]
        console.print(
            f"  norm of the merged delta {merged:.4g}; of the experts' {', '.join(f'{n:.4g}' for n in experts)}; of "
            f"their sum {total:.4g}"
        )
    console.print(
        f"  {size(plan.read_bytes)} read, {size(plan.write_bytes)} written in {seconds:.1f} s; "
        "all hashes in actmat_manifest.json"
    )
    for note in plan.notes:
        console.print(f"  note: {note}", markup=False)


def describe_adapter(location: str) -> dict[str, Any]:
    """What an adapter holds, as plain data; problems included."""
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
