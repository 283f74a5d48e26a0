"""Models are loaded one at a time.

`from_pretrained` swaps functions of its library for the time of a load (`PreTrainedModel.tie_weights` among them) and
puts back what it found. Of two loads in two threads the second finds, and in the end leaves, what the first had put
there: from then on no model of the process has its weights tied.
"""

from __future__ import annotations

import threading

__all__ = ["LOADING"]

LOADING = threading.RLock()
"""Held around every load, and every model made, in code that several threads run."""
