"""docs/paper.json lists everything that the paper numbers, in its order; the page shows all of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from docs.labels import FILE, labelled
from tests.helpers.repository import ROOT

LISTED = json.loads(FILE.read_text(encoding="utf-8"))
SOURCE = r"""
\newtheorem{lemma}[theorem]{Lemma}
\begin{document}
\section{One}\label{sec:one}
% \label{gone}
\paragraph{Words.}\label{par}
\begin{equation}\label{eq:a} x \\ y \end{equation}
\begin{restatable}[]{theorem}{name}\label{thm:a}
\begin{multline} x \\ y \end{multline}
\end{restatable}
\begin{lemma}\label{lem:a}\begin{align} a &= b \label{eq:b} \\ &= c \notag \\ &= d \label{eq:c} \end{align}\end{lemma}
\begin{align*} a \\ b \end{align*}
\begin{figure}
\begin{subfigure}{x}\caption{first}\label{fig:x}\end{subfigure}
\begin{subfigure}{x}\caption{second}\label{fig:y}\end{subfigure}
\caption{both}\label{fig:z}
\end{figure}
\begin{figure}\captionof{table}{of a figure}\label{tab:a}\end{figure}
\begin{table*}\caption{another}\label{tab:b}\end{table*}
\appendix
\section{Two}
\subsection{Three}\label{app:b}
\begin{lemma}\end{lemma}
\end{document}
"""


def found(source: str) -> list[tuple[str, str, str]]:
    return [(item.label, item.kind, item.number) for item in labelled(source)]


def test_numbers_are_those_of_latex() -> None:
    assert found(SOURCE) == [
        ("sec:one", "section", "1"),
        ("par", "paragraph", "1"),
        ("eq:a", "equation", "1"),
        ("thm:a", "theorem", "1.1"),
        ("", "equation", "2"),
        ("lem:a", "lemma", "1.2"),
        ("eq:b", "equation", "3"),
        ("eq:c", "equation", "4"),
        ("fig:x", "figure", "1a"),
        ("fig:y", "figure", "1b"),
        ("fig:z", "figure", "1"),
        ("tab:a", "table", "1"),
        ("tab:b", "table", "2"),
        ("", "section", "A"),
        ("app:b", "section", "A.1"),
        ("", "lemma", "A.1"),
    ]


def test_the_page_shows_every_item() -> None:
    page = (ROOT / "docs" / "paper.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    missing = [e["label"] for e in LISTED if e["label"] and not any(f"`{e['label']}`" in row for row in rows)]
    assert missing == []
    starts = [re.sub(r"[()]", "", row.split("|")[1].strip()).partition("-")[0] for row in rows]
    words = {"equation": "", "paragraph": "Section "}
    items = [words.get(e["kind"], e["kind"].capitalize() + " ") + e["number"] for e in LISTED if "words" in e]
    assert [item for item in items if item not in starts] == []


def test_items_without_words_are_steps_of_a_proof() -> None:
    assert "words" in LISTED[0]
    assert {e["kind"] for e in LISTED if "words" not in e} == {"equation"}
    assert {key for e in LISTED for key in e} == {"label", "kind", "number", "words", "here", "differs"}
    assert len({(e["kind"], e["number"]) for e in LISTED if e["kind"] != "paragraph"}) == len(LISTED) - 1


@pytest.mark.skipif("ACTMAT_PAPER" not in os.environ, reason="ACTMAT_PAPER names no paper.tex")
def test_the_list_is_that_of_the_source() -> None:
    source = Path(os.environ["ACTMAT_PAPER"]).read_text(encoding="utf-8")
    assert found(source) == [(e["label"], e["kind"], e["number"]) for e in LISTED]
