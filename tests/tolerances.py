"""The tolerances that tests share, with their reasons.

They bound *relative Frobenius errors*, not single entries. A test whose construction fixes its own error (a condition
number, a number of samples, a file format) may state a number where it is used. A test that misses its tolerance has
found something: nobody raises a number, here or there, to make it pass.
"""

import torch
from torch import Tensor

F64_IDENTITY = 1e-12
"""An identity of exact arithmetic (a law of a method, low-rank = dense, one expert -> itself), computed in float64 on
well-conditioned input: eps = 2.2e-16, times a few thousand for the lengths of sums and for condition numbers to 1e3."""

F64_ORACLE = 1e-10
"""A float64 implementation against a naive float64 transcription that squares the deltas: with a condition number of
1e3 in the deltas, forming the Gram matrix amplifies eps by 1e6."""

F32_ELEMENTWISE = 1e-6
"""An elementwise rule in float32: each entry is a handful of roundings of 6e-8, and their average is smaller."""

F32_PRODUCT = 1e-5
"""A product of matrices, or an orthogonal change of basis, in float32: sums of up to some thousand terms."""

F32_SOLVE = 1e-4
"""A float32 solve with the default cut-off `I * eps(float32)` on well-conditioned deltas: the squared system keeps
half of the seven digits. Same cut-off on both sides; where eigenvalues straddle it, the answers may differ at will."""

F32_FORWARD = 1e-3
"""A forward pass of two layers in float32 whose weights agree to `F32_SOLVE`: every layer adds its own difference, and
norms and softmax pass a relative difference on at a small multiple."""

BF16_ROUNDING = 2.0**-8
"""One rounding to bfloat16 (8 bits of significand): at most half a unit in the last place, 2^-9 to 2^-8 relative."""

F16_ROUNDING = 2.0**-11
"""One rounding to float16 (11 bits of significand), for entries in its normal range."""


def relative_error(out: Tensor, expected: Tensor) -> float:
    """`||out - expected||_F / ||expected||_F` in float64; the absolute norm where `expected` is exactly zero."""
    if out.shape != expected.shape:
        raise AssertionError(f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}")
    difference = torch.linalg.vector_norm(out.double() - expected.double()).item()
    size = torch.linalg.vector_norm(expected.double()).item()
    return difference / size if size else difference
