"""The merges whose bytes are compared: one of every way through the program.

Paths are relative to a folder next to `inputs`, so that both revisions are given the same command lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INPUTS = Path("..") / "inputs"


@dataclass(frozen=True)
class Merge:
    """One command `actmat merge`.

    Args:
        arguments: what says which models are merged and how; `actmat plan` takes the same.
        recipe: text of the recipe file, which is the first argument then.
        running: further flags of `actmat merge`, which `actmat plan` does not have.
    """

    name: str
    arguments: tuple[str, ...]
    recipe: str = ""
    running: tuple[str, ...] = ()

    def recipe_file(self, inputs: Path) -> Path:
        """Path of the recipe file in the folder of the inputs, to which paths in recipes are relative."""
        return inputs / f"{self.name}.yaml"

    def inputs(self) -> list[str]:
        """The arguments, the recipe's path included."""
        return [*([str(self.recipe_file(INPUTS))] if self.recipe else []), *self.arguments]


def of(family: str, *flags: str, experts: Sequence[str] = ("math", "code"), method: str = "actmat") -> tuple[str, ...]:
    """Arguments of a merge of full checkpoints."""
    return (*_base(family), *_experts(*(f"{family}/{e}" for e in experts)), "-m", method, *flags)


def adapters(kind: str, *flags: str, method: str = "actmat", base: str = "") -> tuple[str, ...]:
    """Arguments of a merge of two adapters, with a base into a model."""
    pair = _experts(*(f"adapters/{kind}-{e}" for e in ("math", "code")))
    return (*_base(base), *pair, "-m", method, *flags)


def variants(methods: Sequence[str], *flags: str) -> tuple[str, ...]:
    """Arguments of several merges of three Llamas in one run."""
    first, *others = methods
    more = [flag for method in others for flag in ("-m", method)]
    return (*of("llama", experts=("math", "code", "law"), method=first), *more, *flags)


def _base(family: str) -> tuple[str, ...]:
    return ("-b", str(INPUTS / family / "base")) if family else ()


def _experts(*paths: str) -> tuple[str, ...]:
    return tuple(flag for path in paths for flag in ("-e", str(INPUTS / path)))


def _statistics(method: str) -> tuple[str, ...]:
    given = [flag for e in ("math", "code") for flag in ("--statistics", f"{e}={INPUTS / 'statistics' / e}")]
    return of("llama", *given, method=method)


RULES = """\
base: llama/base
experts:
  - {path: llama/math, weight: 0.7}
  - {path: llama/code, weight: 1.2}
method: actmat_ridge
scale: 0.8
keep: ['*.1.self_attn.o_proj.weight']
rules:
  - {match: ['*.q_proj.weight'], method: ties, options: {density: 0.3}}
  - {match: ['*.down_proj.weight'], scale: 0.5}
  - {match: ['model.embed_tokens.weight'], method: dare}
roles:
  - {match: '*.up_proj.weight', blocks: {first: [0, 88], second: [88, 176]}}
postprocess: {lines: [0.5, 1.0], norm_cap: mean}
seed: 3
"""

ADAPTER_RULES = """\
experts:
  - {path: adapters/linear-math, weight: 0.7}
  - {path: adapters/linear-code, weight: 1.2}
method: actmat
keep: ['*.v_proj.weight']
rules:
  - {match: ['*.q_proj.weight'], method: tsv}
postprocess: {lines: [0.5, 1.0], norm_cap: mean}
"""

MERGES = (
    Merge("full", of("llama", experts=("math", "code", "law"))),
    Merge("float64", of("llama", "--set", "compute_dtype=float64")),
    Merge("paper", of("llama", "--set", "scope=paper")),
    Merge("one-worker", of("llama", method="actmat_ridge"), running=("--threads", "1")),
    Merge("two-workers", of("llama", method="actmat_ridge"), running=("--threads", "2")),
    Merge("sharded", of("sharded", "--set", "max_shard_size=1500KB")),
    Merge("bfloat16", of("bfloat16", experts=("math", "code", "law"))),
    Merge("bfloat16-ties", of("bfloat16", "--set", "scope=all", method="ties")),
    Merge("float16-out", of("bfloat16", "--set", "scope=all", "--dtype", "float16", method="task_arithmetic")),
    Merge("rules", (), RULES),
    Merge("diagnosed", of("llama"), running=("--diagnose",)),
    Merge("average", of("llama", "--set", "scope=all", method="average")),
    Merge("model-stock", of("llama", "--set", "scope=all", method="model_stock")),
    Merge("ties-global", of("llama", "-o", "trim=global", "--set", "scope=all", method="ties")),
    Merge("dare", of("llama", "--set", "seed=7", "--set", "scope=all", method="dare")),
    Merge("tsv", of("llama", method="tsv")),
    Merge("iso_c", of("llama", method="iso_c")),
    Merge("elementwise", variants(["linear", "karcher", "sce", "della", "breadcrumbs"], "--set", "scope=all")),
    Merge("options", variants(["ties", "task_arithmetic", "dare"], "-o", "density=0.2,0.5")),
    Merge("matrix", variants(["actmat_ridge", "wudi", "swudi", "aswudi", "iso_cts"])),
    Merge("regmean", _statistics("regmean")),
    Merge("fisher", _statistics("fisher")),
    Merge("packed", of("gpt2")),
    Merge("stacked", of("mixture")),
    Merge("lora", adapters("linear")),
    Merge("lora-model", adapters("linear", base="llama")),
    Merge("lora-ranks", adapters("ranks", "--set", "ranks=pattern")),
    Merge("lora-cut", adapters("ranks", "--rank", "4", method="iso_c")),
    Merge("lora-rules", (), ADAPTER_RULES),
    Merge("lora-table", adapters("table", "--set", "scope=all", method="average")),
    Merge("lora-table-model", adapters("table", base="llama")),
    Merge("lora-saved", adapters("saved")),
    Merge("lora-saved-model", adapters("saved", base="llama")),
    Merge("lora-packed", adapters("packed", "-b", str(INPUTS / "gpt2/base"), "--to", "adapter")),
    Merge("lora-packed-model", adapters("packed", base="gpt2")),
    Merge("lora-knots", adapters("linear", method="knots")),
    Merge("lora-knots-model", adapters("linear", method="knots", base="llama")),
    Merge("lora-ties-global", adapters("linear", "-o", "trim=global", method="ties")),
    Merge("lora-dare", adapters("linear", method="dare")),
    Merge("lora-dare-model", adapters("linear", method="dare", base="llama")),
    Merge("lora-options", adapters("linear", "-m", "tsv", "-m", "actmat_ridge")),
    Merge("lora-and-full", (*_base("llama"), *_experts("adapters/linear-math", "llama/code"), "-m", "actmat")),
    Merge("lora-lone-table", (*_experts("adapters/table-math", "adapters/linear-code"), "-m", "actmat")),
)
