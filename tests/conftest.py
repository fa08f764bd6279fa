import signal
from collections.abc import Iterator

import pandas as pd
import pytest
from fakes import grid_runs
from processes import ENDINGS


@pytest.fixture(scope="session")
def paper_runs(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """A made-up run for each spec of the grid `paper`."""
    return grid_runs(tmp_path_factory.mktemp("paper"), "paper")


@pytest.fixture
def handlers() -> Iterator[None]:
    """This process's handlers of signals are brought back: after the test, Ctrl-C ends it as before."""
    before = {number: signal.getsignal(number) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
