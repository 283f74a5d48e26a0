"""Commands of other distributions: found by their entry points, imported when needed, named when they are missing."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import typer
from tests.helpers.merging import actmat

from actmat.cli import listing

toy = typer.Typer(name="toy", help="A command of another distribution.", no_args_is_help=True)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Entry points by name; what is put here is installed for the test."""
    from actmat.cli.main import app

    found: dict[str, str] = {}

    def extensions_now() -> dict[str, EntryPoint]:
        return {n: EntryPoint(n, value, listing.ENTRY_POINTS) for n, value in found.items()}

    monkeypatch.setattr(listing, "plugged_in", extensions_now)
    before = len(app.registered_commands)
    yield found
    assert len(app.registered_commands) == before


def test_a_command_of_actmat_takes_precedence(installed: dict[str, str]) -> None:
    installed["methods"] = f"{__name__}:toy"
    text = actmat(["--help"]).out
    assert text.count("methods ") == 1
    assert "A command of another distribution." not in text


def test_an_extension_that_cannot_be_imported_is_not_listed(installed: dict[str, str]) -> None:
    installed["broken"] = "no_such_module_anywhere:app"
    outcome = actmat(["--help"], code=0)
    assert "broken" not in outcome.out
    actmat(["broken"], code=2)


@pytest.mark.parametrize("name", ["experiment", "analyze"])
def test_a_command_that_is_not_installed_says_what_to_install(installed: dict[str, str], name: str) -> None:
    outcome = actmat([name, "--help"], code=2)
    assert "pip install actmat-experiments" in outcome.words


def test_the_experiments_are_installed_here() -> None:
    assert {"experiment", "analyze"} <= listing.plugged_in().keys()


def test_there_are_at_most_18_commands_each_in_a_group() -> None:
    group = listing.Commands()
    names = group.list_commands(None)
    assert len(names) <= 18
    assert {listing.info_of(listing.declared_command(n)).group for n in names} == set(listing.GROUPS) - {"more"}
