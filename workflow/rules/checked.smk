# Before Snakemake reads configuration files: its own reader keeps the last of two equal keys, and runs templates (YTE).
from pathlib import Path

from linvit.config import ConfigError, read_yaml

try:
    for path in dict.fromkeys(["config.yaml", *workflow.configfiles]):
        if Path(path).exists() and "__use_yte__" in (read_yaml(path) or {}):
            raise ConfigError(
                f"{path}: __use_yte__: templates may run code; allowed: plain YAML"
            )
except ConfigError as error:
    raise WorkflowError(str(error)) from None
