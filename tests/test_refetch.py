"""Weights may be deleted: what can be fetched is fetched again, and is checked to be the same."""

import pytest
from tiny import SIZE, softmax_weights, source, spec, write_npz

from linvit import sources
from linvit.run import load_weights, train
from linvit.sources import SourceError


@pytest.fixture
def prepared(tmp_path):
    """A source fetched from a file, whose stored weights are then deleted."""
    file = tmp_path / "published.safetensors"
    file.write_bytes(sources.to_safetensors(softmax_weights(SIZE), {}))
    made = source(path=str(file))
    folder = tmp_path / "sources" / made.folder
    sources.fetch(made, folder)
    (folder / sources.WEIGHTS).unlink()
    return made


def test_a_run_fetches_a_sources_deleted_weights_again(tmp_path, prepared):
    run_spec = spec(write_npz(tmp_path / "bands.npz"), "relu", "copy", source=prepared)
    metrics = train(run_spec, tmp_path / "run", sources_folder=tmp_path / "sources", data_root=tmp_path)
    assert metrics["name"] == run_spec.name
    assert (tmp_path / "sources" / prepared.folder / sources.WEIGHTS).exists()


def test_weights_that_were_trained_are_not_trained_again_behind_ones_back(tmp_path, prepared):
    trained = prepared.model_copy(update={"path": None, "train": spec("x.npz", "softmax", role="source")})
    with pytest.raises(SourceError, match=r"weights\.safetensors: not found"):
        load_weights(trained, tmp_path / "sources")
