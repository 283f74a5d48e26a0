"""Declared memory and passes of the singular-vector methods, measured."""

import pytest
import torch
from tests.helpers.memory import peak_bytes
from tests.helpers.spectra import random_deltas

from actmat.extras.research.iso_c import ISO_C
from actmat.extras.research.iso_cts import ISO_CTS
from actmat.extras.research.knots import KNOTS
from actmat.extras.research.tsv import TSV
from actmat.methods.contract import MergeMethod
from actmat.methods.ct_merging import CT_MERGING

CASES = [
    (TSV, {}),
    (TSV, {"rank_aware": False}),
    (ISO_C, {}),
    (ISO_C, {"null": "fill"}),
    (CT_MERGING, {}),
    (ISO_CTS, {}),
    (KNOTS, {"trim": "tensor"}),
    (KNOTS, {"rule": "dare"}),
    (KNOTS, {"rule": "tsv"}),
    (KNOTS, {"rule": "iso_c", "order": "actmat"}),
]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 400), torch.float32), ((400, 64), torch.float64), ((128, 128), torch.float32)]
)
@pytest.mark.parametrize(("method", "options"), CASES)
def test_the_declared_workspace_bounds_the_measured_peak(method: MergeMethod, options, shape, dtype):
    deltas = random_deltas(4, *shape, dtype=dtype)
    given = {"generator": torch.Generator()} if method.is_random else {}
    peak = peak_bytes(lambda: method.merge(deltas, **given, **options)) / dtype.itemsize
    declared = method.cost.workspace(shape, 4, method.resolve_options(options))
    assert peak <= declared
    assert declared <= 6 * peak
