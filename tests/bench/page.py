"""All benchmarks of a folder on one page, README.md: the sections that they wrote, in this order."""

import argparse
import re
from pathlib import Path

from linvit.files import write_text

SECTIONS = ("operators", "inference", "training", "workflow", "executors")


def page(folder: Path) -> str:
    """The sections that are there; each begins with a heading of its own, here below the page's."""
    sections = [path.read_text() for name in SECTIONS if (path := folder / f"{name}.md").exists()]
    lowered = [re.sub("^#", "##", section, flags=re.MULTILINE) for section in sections]
    return "\n\n".join(["# Benchmarks", "`make bench`. Every figure is a ratio within one run.", *lowered]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Put a folder's benchmarks on one page.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/bench"), help="(%(default)s)")
    folder = parser.parse_args(arguments).folder
    write_text(folder / "README.md", page(folder))
    print(folder / "README.md")


if __name__ == "__main__":
    main()
