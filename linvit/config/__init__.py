"""The configuration: the parts of `config.yaml`, checked before anything runs, and what is told of a mistake in it.

Nothing here imports torch: a login node that only builds the DAG reads this package.
"""

from linvit.config.errors import ConfigError, Interrupted, RunEnded, UserError, printable, reason_of
from linvit.config.mistakes import first_mistake
from linvit.config.parts import (
    DISTANCES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    NO_SOURCE,
    Align,
    Block,
    Dataset,
    DatasetEntry,
    Distill,
    Group,
    Init,
    Name,
    Part,
    Recipe,
    Seed,
    Size,
    SourceEntry,
    TrainEntry,
    Variant,
    VariantEntry,
)
from linvit.config.study import Study, load_study, study_from
from linvit.config.targets import check_targets, resolve_class
from linvit.config.yaml_file import read_yaml

__all__ = [
    "DISTANCES",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "NO_SOURCE",
    "Align",
    "Block",
    "ConfigError",
    "Dataset",
    "DatasetEntry",
    "Distill",
    "Group",
    "Init",
    "Interrupted",
    "Name",
    "Part",
    "Recipe",
    "RunEnded",
    "Seed",
    "Size",
    "SourceEntry",
    "Study",
    "TrainEntry",
    "UserError",
    "Variant",
    "VariantEntry",
    "check_targets",
    "first_mistake",
    "load_study",
    "printable",
    "read_yaml",
    "reason_of",
    "resolve_class",
    "study_from",
]
