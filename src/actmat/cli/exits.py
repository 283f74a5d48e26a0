"""Exit codes of the commands: what each returns, and when. Their pages are made from this table."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMON", "EXITS"]

COMMON: Mapping[int, str] = {
    2: "the command line is wrong",
    3: "failed while running: numerically, for want of memory, or because of a bug, of which a report is written",
    130: "interrupted (Ctrl-C); 143: SIGTERM, 129: SIGHUP",
    141: "the reader of stdout went away",
}
"""Codes that every command may return."""

_INPUTS = "the inputs, the recipe or the output place are wrong; all problems are listed"

EXITS: Mapping[str, Mapping[int, str]] = {
    "analyze": {0: "measured and saved", 1: f"there are results already; {_INPUTS}"},
    "average": {0: "averaged, or found complete and intact", 1: _INPUTS},
    "compare": {0: "compared, whether they differ or not", 1: "no two merges of the same base and experts"},
    "demo": {0: "all merges are there", 1: "the output place or a method is wrong"},
    "diagnose": {
        0: "measured, whatever the checks found",
        1: f"{_INPUTS}; with `--strict`, a check of severity issue found something",
    },
    "experiment": {
        0: "run, or shown",
        1: "no such suite or method, data are missing, or nothing was run with this cache",
    },
    "export": {0: "written", 1: "the checkpoint cannot be read, or the output place is wrong"},
    "extract": {0: "extracted, or found complete", 1: _INPUTS},
    "finish": {0: "the output is complete", 1: "a part is missing or damaged; the command that makes it is named"},
    "history": {0: "told", 1: "no such folder or file; with `--contains` or `--made`, no merge was found"},
    "import": {0: "the recipe is printed", 1: "it cannot be converted; all reasons are listed"},
    "inspect": {0: "described", 1: "no checkpoint or adapter that can be read"},
    "merge": {
        0: "merged, or found complete and intact",
        1: f"{_INPUTS}; with `--strict`, a check of severity issue found something (the output stays)",
    },
    "methods": {0: "listed", 1: "there is no such method"},
    "plan": {0: "the merge can be done", 1: _INPUTS},
    "push": {0: "sent, or listed with `--dry-run`", 1: "no finished merge, or the hub refuses it"},
    "report": {0: "the page is written", 1: "no report that this version reads, or no place to write"},
    "serve-command": {0: "printed", 1: "no finished merge; with `--quiet`, vLLM cannot serve it"},
    "statistics": {0: "measured, added up or shown", 1: "the model, the data or the statistics are wrong"},
    "try": {0: "answered", 1: _INPUTS},
    "tune": {0: "found and merged", 1: _INPUTS},
    "ui": {0: "ended by Ctrl-C", 1: "the page cannot be opened on that port"},
    "verify": {0: "everything matches", 1: "something differs, or there is no finished merge"},
}
"""Command -> code -> meaning, besides `COMMON`."""
