"""Decompositions that fail as LAPACK does."""

import pytest
import torch


def failing(monkeypatch: pytest.MonkeyPatch, name: str, failures: int = 1) -> list[torch.dtype]:
    """Let the first `failures` calls of a function of `torch.linalg` not converge; the dtypes of all calls."""
    real, calls = getattr(torch.linalg, name), []

    def attempt(matrix: torch.Tensor, **options: object) -> object:
        calls.append(matrix.dtype)
        if len(calls) <= failures:
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix, **options)

    monkeypatch.setattr(torch.linalg, name, attempt)
    return calls
