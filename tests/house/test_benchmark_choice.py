"""The method of `method: auto` is the one that the committed scores choose by the criterion."""

from __future__ import annotations

from benchmarks.evidence.choice import TOLERATED, choices, gains, on_adapters
from benchmarks.evidence.group import FOLDER

from actmat.methods import get_method
from actmat.run.automatic import ON_ADAPTERS, TABLE


def test_the_table_is_that_of_the_scores() -> None:
    assert choices() == TABLE
    assert on_adapters() == ON_ADAPTERS


def test_the_default_is_never_more_than_a_point_below_the_average() -> None:
    for (form, kind), choice in TABLE.items():
        assert min(gains(FOLDER, form, kind)[choice.name]) >= TOLERATED, (form, kind)


def test_the_default_works_without_data_and_of_adapters_without_a_base() -> None:
    for (form, _), choice in TABLE.items():
        method = get_method(choice.method)
        assert not method.needs_statistics
        assert form == "full" or method.lowrank is not None
