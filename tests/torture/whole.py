"""Whether files are whole."""

import json
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file

from linvit.archives import read_npz
from linvit.checkpoints import load

READERS = {
    ".json": lambda path: json.loads(path.read_text()),
    ".npz": lambda path: read_npz(path, ("key", "sha256", "shapes", "labels")),
    ".pt": load,
    ".safetensors": load_file,
}


def read_all(folder: Path) -> None:
    """Read every file below that is there by its own name, as its readers would: none is torn."""
    for path in folder.rglob("[!.]*.*"):
        with suppress(FileNotFoundError):  # a checkpoint that is not needed any more
            READERS.get(path.suffix, Path.stat)(path)
