"""The folder of a demo, the methods that can run on its experts, and one merge by the real engine."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from actmat.errors import OutputError, RecipeError
from actmat.methods import MergeMethod, all_methods, get_method

_MARK = ".actmat-demo"


class DemoFolder:
    """Paths below the output folder: checkpoints, heads (outside of them, because they are not merged), all numbers."""

    def __init__(self, root: Path) -> None:
        self.root, self.base = root, root / "base"
        self.heads, self.results = root / "heads.safetensors", root / "results.json"

    def expert(self, task: str) -> Path:
        """Checkpoint of a task's expert."""
        return self.root / "experts" / task

    def merged(self, method: str) -> Path:
        """Checkpoint that a method has made."""
        return self.root / "merged" / method


def claim_folder(root: Path, tasks: Collection[str], *, overwrite: bool) -> DemoFolder:
    """Make the folder and mark it as a demo's; an earlier demo there is removed only if `overwrite`.

    Only what a demo writes is removed, and only from a folder that carries its mark: the base, the experts of `tasks`
    and a merge by each method.

    Raises:
        OutputError: something is there already that may not be replaced, or the place cannot be written.
    """
    folder = DemoFolder(root)
    if root.exists() and not root.is_dir():
        raise OutputError(f"{root} is a file; the demo needs a folder. Choose another place with --out.")
    if root.exists() and any(root.iterdir()):
        if not (root / _MARK).is_file():
            raise OutputError(
                f"{root} is not empty and was not made by the demo, so it is left alone. "
                "Choose another place with --out."
            )
        if not overwrite:
            raise OutputError(
                f"{root} holds an earlier demo. Give --overwrite to replace it, or another place with --out."
            )
        parents = {root / "experts": tasks, root / "merged": {m.name for m in all_methods()}}
        if strange := [
            str(p) for d, names in parents.items() if d.is_dir() for p in d.iterdir() if p.name not in names
        ]:
            raise OutputError(
                f"{root} holds what no demo wrote, and --overwrite will not delete it. Move it elsewhere, or choose "
                "another place with --out.",
                sorted(strange),
            )
        for made in (folder.base, *parents):
            if made.exists():
                shutil.rmtree(made)
        for made in (folder.heads, folder.results):
            made.unlink(missing_ok=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / _MARK).touch()
    except OSError as error:
        raise OutputError(f"{root} cannot be written: {error.strerror}. Choose another place with --out.") from error
    return folder


def choose_methods(
    wanted: Sequence[str] | None, n_experts: int, statistics: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Names of the rules to run, and the reasons why others are left out.

    Args:
        wanted: names in the order of the table, or None for every rule that can run.
        statistics: kinds of statistics that are there.

    Raises:
        RecipeError: a wanted rule is unknown or cannot run here.
    """
    chosen = all_methods() if wanted is None else list(map(get_method, wanted))
    reasons = {m.name: _why_not(m, n_experts, statistics) for m in chosen}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if wanted is not None and left_out:
        raise RecipeError(
            "Not all these methods can run here: all experts are merged at once, with the statistics that are there.",
            [f"'{name}' {reason}" for name, reason in left_out.items()],
        )
    return [name for name in dict.fromkeys(reasons if wanted is None else wanted) if name not in left_out], left_out


def _why_not(method: MergeMethod, n_experts: int, statistics: Sequence[str]) -> str | None:
    """Reason why the rule cannot merge that many experts with these kinds of statistics; None if it can."""
    if missing := [kind for kind in method.needs_statistics if kind not in statistics]:
        return f"needs statistics measured on data: {', '.join(missing)}"
    if method.max_experts is not None and n_experts > method.max_experts:
        return f"merges at most {method.max_experts} expert(s), not {n_experts}"
    return None


def merge_experts(base: Path, experts: Mapping[str, Path], method: str, out: Path, *, seed: int, threads: int) -> None:
    """Merge as `actmat merge` would; not flushed to the disk, since a demo that loses power is run again."""
    from actmat.recipe import make_recipe
    from actmat.run import run_recipes
    from actmat.settings import RunSettings

    named = [{"path": str(path), "name": name} for name, path in experts.items()]
    fields = {"base": str(base), "experts": named, "method": method, "seed": seed, "output": "model", "out": str(out)}
    run_recipes([make_recipe(fields)], RunSettings(threads=threads, durable=False))
