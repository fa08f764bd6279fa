import pandas as pd
import pytest
from fakes import grid_runs


@pytest.fixture(scope="session")
def paper_runs(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """A made-up run for each spec of the grid `paper`."""
    return grid_runs(tmp_path_factory.mktemp("paper"), "paper")
