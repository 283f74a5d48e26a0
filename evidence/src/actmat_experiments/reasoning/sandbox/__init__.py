"""Run code that a model wrote: in a process of its own, within limits, never in the evaluating process.

`guard.py` runs between the evaluation and the program: it sets up the fences, starts the program, kills what outlives
it. It and `fences.py` import only the standard library, because they run as a script with nothing on their path.
"""

from __future__ import annotations

from actmat_experiments.reasoning.sandbox.run import Limits, Verdict, protections, require_protections, run_program

__all__ = ["Limits", "Verdict", "protections", "require_protections", "run_program"]
