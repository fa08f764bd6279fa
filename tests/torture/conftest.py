"""The product is broken on purpose, and what survives is counted.

All of it is `make torture`. A test that takes more than seconds is marked `torture`, which `make test` leaves out. Each
counts its faults by the fixture `tally`.
"""

from pathlib import Path

import pytest
from tally import Tally
from victim import Victim

TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[TALLY].counts:
        terminalreporter.section("faults on purpose")
        terminalreporter.write_line(str(config.stash[TALLY]))


@pytest.fixture
def tally(pytestconfig: pytest.Config) -> Tally:
    return pytestconfig.stash[TALLY]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    """The study as it ends when nothing happens to it."""
    victim = Victim(tmp_path_factory.mktemp("undisturbed"))
    assert victim.finish(victim.start()) == 0, victim.said()
    return victim


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path)
