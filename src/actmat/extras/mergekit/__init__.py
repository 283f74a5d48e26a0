"""Recipes of mergekit, read as recipes of actmat: text to text, no tensor and no model is opened.

The meaning of every field is that of mergekit 0.1.5, as its outputs show it.
C. Goddard et al., "Arcee's MergeKit: a toolkit for merging large language models", EMNLP 2024.
"""

from __future__ import annotations

from actmat.extras.mergekit.convert import convert, is_mergekit

__all__ = ["convert", "is_mergekit"]
