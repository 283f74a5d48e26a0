"""`actmat ui`: a page on this machine to choose inputs, see the plan, merge, watch and compare.

It writes recipes and calls the library: nothing is in it that the command line lacks.
"""

from __future__ import annotations

from actmat.extras.ui.server import Server

__all__ = ["Server"]
