"""The merges that `llm-qwen` compares: methods without data, `merge --data` with a few prompts, regressions by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from actmat_experiments.harness.suite import known_names
from actmat_experiments.pretrained.qwen.tasks import Words

By = Literal["weights", "tool", "layers"]
"""Ways of a merge: from weights only; by `merge --data`; or by the inputs of layers."""
Prompts = Words | Literal["self", "mixed", "random"]
"""Prompts of the task in some words; those that the experts write; half of the first and half of these; or prompts of
random tokens, as long as those in the words of the training."""


@dataclass(frozen=True, slots=True)
class Row:
    """A merge of the table.

    Args:
        name: of the row.
        method, options, post: of the merge.
        by: how it is merged.
        prompts: of each task, where there are some.
        number: of these prompts; 0 takes all that the settings ask for.
        toward: row from whose merge the regression starts.
        prior: share of the experts' own `D^T D`, at equal traces, that is added to the Gram matrices of the layers.
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    post: tuple[str, ...] = ()
    by: By = "weights"
    prompts: Prompts = "training"
    number: int = 0
    toward: str = ""
    prior: float = 0.0

    @property
    def about(self) -> dict[str, Any]:
        """Facts for the lines of its scores."""
        facts: dict[str, Any] = {"rule": self.method, "options": dict(self.options)}
        facts |= {"post": list(self.post)} if self.post else {}
        if self.by != "weights":
            facts |= {"by": self.by, "prompts": self.prompts}
            facts |= {"number": self.number} if self.number else {}
        facts |= {"toward": self.toward} if self.toward else {}
        return facts | ({"prior": self.prior} if self.toward or self.prior else {})


def _plain(method: str, *post: str) -> Row:
    return Row("+".join((method, *post)), method, post=post)


def _tool(words: Words) -> Row:
    return Row(f"regmean:data={words}", "auto", by="tool", prompts=words)


def _regression(prompts: Prompts, ridge: float, toward: str = "", prior: float = 0.0, number: int = 0) -> Row:
    facts = {"number": number, "toward": toward, "ridge": ridge, "prior": prior}
    name = ":".join([prompts, *(f"{key}={value}" for key, value in facts.items() if value)])
    options: dict[str, Any] = {"ridge": ridge} | ({"normalize": "trace"} if toward else {})
    fields: dict[str, Any] = {"prompts": prompts, "number": number, "toward": toward, "prior": prior}
    return Row(f"regmean:{name}", "regmean", options, by="layers", **fields)


ROWS: tuple[Row, ...] = (
    *(_plain("average"), _plain("auto"), _plain("ct_merging"), _plain("dc_merge"), _plain("tsv")),
    *(_tool("training"), _tool("other")),
    Row("task_arithmetic_1", "task_arithmetic", {"scaling": 1.0}),
    *(_plain("knots"), _plain("actmat_ridge"), _plain("actmat")),
    _regression("training", 0.001),
    *(_regression("training", ridge, "ct_merging") for ridge in (0.05, 0.5)),
    _regression("training", 0.05, "ct_merging", prior=0.5),
    _regression("other", 0.001),
    _regression("other", 0.05, "ct_merging"),
    Row("ssr:training", "ssr", by="layers"),
    *(_plain("tsv", "mean_norm"), _plain("dc_merge", "mean_norm")),
    *(_plain("iso_c"), _plain("aswudi"), _plain("cart")),
    *(_regression(prompts, 0.001, prior=0.5, number=8) for prompts in ("training", "self", "mixed", "random")),
    _regression("self", 0.001, prior=0.125, number=32),
)
"""All rows, the most telling first: a run that ends early lacks the last ones. `auto` is the method that `actmat merge`
takes; `task_arithmetic_1` is the sum; a prior of 4 / n is that of `merge --data` for n prompts."""


def chosen_rows(names: Sequence[str] | None) -> tuple[Row, ...]:
    """The rows of these names, all by default; with the row from whose merge one of them starts.

    Raises:
        RecipeError: a name is unknown.
    """
    if names is None:
        return ROWS
    known = {row.name: row for row in ROWS}
    needed = {*known_names(names, known, "row"), *(known[name].toward for name in names)}
    return tuple(row for row in ROWS if row.name in needed)
