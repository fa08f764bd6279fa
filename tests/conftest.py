import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml
from fakes import grid_runs
from processes import ENDINGS
from tiny import store_source, study_config, write_npz


@pytest.fixture(scope="session")
def paper_runs(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """A made-up run for each spec of the grid `paper`."""
    return grid_runs(tmp_path_factory.mktemp("paper"), "paper")


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    """What `main` sets up for a process is taken back."""
    path = list(sys.path)
    root, timm_level = logging.getLogger(), logging.getLogger("timm").level
    level = root.level
    yield
    root.setLevel(level)
    logging.getLogger("timm").setLevel(timm_level)
    logging.captureWarnings(False)
    sys.path[:] = path


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with images, a source and a configuration."""
    monkeypatch.chdir(tmp_path)
    npz = write_npz(tmp_path / "bands.npz")
    store_source(tmp_path / "results" / "sources")
    (tmp_path / "config.yaml").write_text(yaml.dump(study_config(npz), sort_keys=False))
    return tmp_path


@pytest.fixture
def handlers() -> Iterator[None]:
    """This process's handlers of signals are brought back: after the test, Ctrl-C ends it as before."""
    before = {number: signal.getsignal(number) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
