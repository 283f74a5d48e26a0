"""Code that a model wrote is run only where it can be fenced."""

from __future__ import annotations

import pytest

from actmat.errors import MergeError
from actmat_experiments.reasoning.sandbox import require_protections


@pytest.fixture
def fenced() -> None:
    try:
        require_protections()
    except MergeError as error:
        pytest.skip(str(error))
