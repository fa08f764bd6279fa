"""What the documentation shows runs, and what it links to is there."""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import models
import pytest
import timm
import torch
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from linvit.cli import parser
from linvit.config import load_study
from linvit.grid import expand
from linvit.run import prepare_source, train

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("workflow/**/*.md")])
NOT_RUN = re.compile(r"\*Not run by the tests: .+\*")
"""The paragraph before a block that cannot run, with the reason, for readers to see."""

SQUARED = "fashion-1k/mini/squared-relu"


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """A page's fenced blocks of code but for those that it says cannot run."""
    before = ""
    for token in tokens_of(page):
        if token.type == "fence" and not NOT_RUN.fullmatch(before):
            yield Block(page, token.map[0] + 1, token.info.partition(" ")[0], token.content)
        before = token.content or before


def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline_of(page: Path, kind: str) -> list[Token]:
    """The links, the code in the text and the like."""
    return [child for token in tokens_of(page) for child in token.children or () if child.type == kind]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def slugs_of(page: Path) -> set[str]:
    """The anchors that a forge and the site give a page's headings."""
    tokens = tokens_of(page)
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_blocks_of_code_are_of_languages_that_are_tested():
    directives = {"{eval-rst}", "{linvit-commands}", "{literalinclude}", "{toctree}"}
    assert {block.language for block in BLOCKS} <= {"", "python", "sh", "yaml", *directives}


@pytest.mark.parametrize("page", sorted({block.page for block in of_language("python")}), ids=named)
def test_python_runs(page, monkeypatch, tmp_path):
    """A page's blocks in their order, on smaller models without downloads."""
    create = timm.create_model

    def smaller(name, pretrained=False, **options):
        return create(name, img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, **options)

    monkeypatch.setattr(timm, "create_model", smaller)
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    images = models.images()
    names = {"images": images, "loader": [(images, torch.tensor([0, 1]))]}
    for block in of_language("python"):
        if block.page == page:
            exec(compile(block.code, str(block), "exec"), names)  # noqa: S102 - our own documentation


def with_block(block: Block, folder: Path) -> Path:
    """The repository's own `config.yaml` with a block put into it, beside the examples' operators."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    for key, value in yaml.safe_load(block.code).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_configuration_is_accepted(block, tmp_path):
    study = load_study(with_block(block, tmp_path))
    for grid in yaml.safe_load(block.code).get("grids", ()):
        assert expand(study, grid)


@pytest.fixture
def squared(tmp_path, monkeypatch) -> Path:
    """A folder with the study of the page on variants."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    (block,) = (block for block in of_language("yaml") if block.page.name == "variant.md")
    return with_block(block, tmp_path).parent


def test_the_example_of_a_variant_is_trained_and_distilled(squared):
    run = expand(load_study(squared / "config.yaml"), "squared")[f"{SQUARED}/fullcopy-distill/fashion/seed0"]
    recipe = run.recipe.model_copy(update={"epochs": 1, "warmup_epochs": 0})
    prepare_source(run.source, squared / "sources" / run.source.folder)
    run = run.model_copy(update={"recipe": recipe})
    metrics = train(run, squared / "run", sources_folder=squared / "sources", data_root=squared)
    assert metrics["top1"] > 50
    assert metrics["history"][0]["distill_loss"] > 0


def test_the_example_of_a_variant_is_planned_by_snakemake(squared):
    command = ["-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--profile", ROOT / "workflow/profiles/local"]
    planned = subprocess.run(
        [sys.executable, *map(str, command), "--directory", str(squared), "--config", "grid=squared", "--dry-run"],
        cwd=squared,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert planned.returncode == 0, planned.stderr
    for init in ("random/none", "copy/fashion", "fullcopy-distill/fashion", "copy-transfer/fashion"):
        assert f"{SQUARED}/{init}/seed0/metrics.json" in planned.stdout + planned.stderr


@pytest.mark.parametrize("block", of_language("sh"), ids=str)
def test_shell_commands_are_commands(block):
    """Not run, but parsed: by the shell, and where they are linvit's, make's or Snakemake's, by these."""
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True, timeout=300)
    for line in block.code.splitlines():
        check_command(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_in_the_text_are_commands(page):
    """By their names: a text does not repeat every argument."""
    for code in inline_of(page, "code_inline"):
        match code.content.split():
            case ["linvit", command, *_] if command[0] not in "-<":
                checked(parser(), [command, "--help"])
            case ["make", target, *_]:
                check_command(["make", target])


def check_command(words: list[str]) -> None:
    match words:
        case ["linvit", *arguments] if "--help" not in arguments:
            checked(parser(), arguments)
        case ["snakemake", *arguments]:
            from snakemake.cli import get_argument_parser

            checked(get_argument_parser(), without_executor(arguments))
        case ["make", target]:
            assert re.search(rf"^[\w -]*\b{target}\b[\w -]*:", (ROOT / "Makefile").read_text(), re.MULTILINE), words


def checked(command: argparse.ArgumentParser, arguments: list[str]) -> None:
    try:
        command.parse_args(arguments)
    except SystemExit as end:
        if end.code:  # that of --help is 0
            pytest.fail(f"refused: {shlex.join(arguments)}")


def without_executor(arguments: list[str]) -> list[str]:
    """Profiles must be there; what is in them is for their own tests."""
    for option, value in pairwise(arguments):
        if option == "--profile":
            assert (ROOT / value / "config.yaml").is_file(), value
    return [argument for argument in arguments if argument not in ("--executor", "submitit")]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    """On a forge, where the site's own check does not see them."""
    links = [token.attrs["href"] for token in inline_of(page, "link_open")]
    links += [token.attrs["src"] for token in inline_of(page, "image")]
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"https?:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in slugs_of(target), f"{page}: {link}"


def test_the_error_of_the_five_minute_start_is_what_is_said(tmp_path, capsys):
    from linvit.cli import main

    text = (ROOT / "docs" / "start.md").read_text()
    (shown,) = re.findall(r"^linvit: error: .+$", text, re.MULTILINE)
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    (block,) = [block for block in of_language("yaml") if block.page.name == "start.md"]
    (grid,) = yaml.safe_load(block.code)["grids"]["mine"]
    config["grids"]["mine"] = [grid | {"variants": ["rleu"]}]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    assert main(["grid", "--config", str(path)]) == 2
    assert capsys.readouterr().err.strip() == shown.replace("config.yaml", str(path), 1)
