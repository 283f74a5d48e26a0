"""Check a merged model and its inputs against the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actmat.report.verify import HashProgress, Verification
from actmat.report.verify import verify as verify_output


def verify(
    out: str | Path,
    *,
    inputs: bool = True,
    against: str | Path | Sequence[str | Path] = (),
    progress: HashProgress = lambda name, nbytes: None,
) -> Verification:
    """Hash every tensor and file of the output and its inputs, and compare with the manifest.

    Args:
        out: directory of a merged model, or its URL.
        inputs: also check base and experts that can still be found.
        against: adapters (or checkpoints), one per expert of the merge, in order: every tensor is compared
        with `W_0 + sum_t c_t D_t`, computed again in float64.
        progress: called with the name and size of each hashed tensor.

    Raises:
        CheckpointError: the manifest is missing or damaged, the output cannot be read, or it is not a sum of deltas.
    """
    adapters = [against] if isinstance(against, str | Path) else list(against)
    if not adapters:
        return verify_output(out, inputs=inputs, progress=progress)
    from actmat.extras.bake.added import check_added

    return verify_output(out, inputs=inputs, against=adapters, compare=check_added, progress=progress)
