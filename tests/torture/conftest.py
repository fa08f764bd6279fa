"""The product is broken on purpose, and what survives is counted.

All of it is `make torture`. A test that takes more than seconds is marked `torture`, which `make test` leaves out. Each
counts its faults by the fixture `tally`.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tally import SEED, Tally
from tiny import write_npz
from tiny_run import Run
from victim import Victim

SEEDS = 2
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


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """A test's own random numbers; what repeats them is told where it fails."""
    request.node.add_report_section("setup", "seed", f"TORTURE_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    """The study as it ends when nothing happens to it."""
    victim = Victim(tmp_path_factory.mktemp("undisturbed"), SEEDS)
    victim.run_again()
    return victim


@pytest.fixture(scope="session")
def expected(undisturbed: Victim) -> dict[str, dict]:
    """Its metrics, by run."""
    return undisturbed.metrics()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    """One run, from its data set and source on."""
    yield from until_the_end(Victim(tmp_path))


@pytest.fixture
def grid(tmp_path: Path, undisturbed: Victim) -> Iterator[Victim]:
    """Several runs whose data set and source are there."""
    yield from until_the_end(Victim(tmp_path, SEEDS), undisturbed)


@pytest.fixture
def endless(tmp_path: Path, undisturbed: Victim) -> Iterator[Victim]:
    """One run that does not end by itself."""
    yield from until_the_end(Victim(tmp_path, epochs=10**6), undisturbed)


def until_the_end(victim: Victim, prepared: Victim | None = None) -> Iterator[Victim]:
    if prepared:
        victim.prepare(prepared)
    yield victim
    victim.end()


@pytest.fixture(scope="session")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bands.npz")


@pytest.fixture(scope="session")
def whole(npz: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The metrics of the run when nothing happens to it."""
    return Run(npz, tmp_path_factory.mktemp("whole"))()
