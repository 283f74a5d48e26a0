"""Convert mergekit configurations to actmat recipes; no tensor or model is opened.

Every field has the meaning of mergekit 0.1.5, as verified on its outputs.
C. Goddard et al., "Arcee's MergeKit: a toolkit for merging large language models", EMNLP 2024.
"""

from __future__ import annotations

from actmat.extras.mergekit.convert import convert, is_mergekit

__all__ = ["convert", "is_mergekit"]
