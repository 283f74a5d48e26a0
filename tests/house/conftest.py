"""Rules that do not hold yet: their tests may fail, with the reason; all others must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

PENDING: dict[str, str] = {
    "test_no_import_cycles": "tables and figures of the vision experiments import each other",
    "test_docstrings_begin_with_their_subject": "some docstrings begin with a clause",
    "test_functions_are_short_and_have_few_parameters": "commands and runs are long and take many arguments",
    "test_no_exception_is_out_of_date": "exceptions are still being collected",
    "test_few_type_checks_are_suppressed": "tensors and modules are two kinds of plans",
    "test_only_experts_know_adapters": "experts have no common protocol",
    "test_packages_have_bounded_sizes": "runs of models and of adapters are two code paths",
    "test_there_is_enough_test": "there is more source than the tests cover",
}
"""Name of a test in this folder -> reason. Empty in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", item.name)
        if item.path.parent == Path(__file__).parent and name in PENDING:
            item.add_marker(pytest.mark.xfail(reason=PENDING[name], strict=False))
