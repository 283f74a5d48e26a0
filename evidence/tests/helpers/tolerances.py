"""Bounds of relative Frobenius errors that tests share; a test never raises one to pass."""

from __future__ import annotations

F64_IDENTITY = 1e-12
"""An identity of exact arithmetic in float64 on well-conditioned input: eps times a few thousand, for sums."""

F64_ORACLE = 1e-10
"""Against a naive float64 transcription that squares its input, of a condition number to 1e3."""

F32_ELEMENTWISE = 1e-6
"""A handful of roundings of each entry in float32."""

F32_PRODUCT = 1e-5
"""A product of matrices in float32: sums of up to some thousand terms."""

F32_SOLVE = 1e-4
"""A solve in float32 on well-conditioned input: the squared system keeps half of the seven digits."""

F32_FORWARD = 1e-3
"""A forward pass of two layers in float32 whose weights agree to `F32_SOLVE`."""
