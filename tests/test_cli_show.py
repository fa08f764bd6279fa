"""What a configuration has to choose from, told in lines and whole."""

import subprocess
import sys

import pytest
import yaml
from commands import environment, refusal
from tiny import CONFIG, STUDY

from linvit.catalogue import INITS, SIZES, VARIANTS
from linvit.cli import main
from linvit.cli.show import TABLES
from linvit.config import study_from


def shown(capsys, *arguments: str) -> str:
    assert main(["show", *arguments, "--config", str(CONFIG)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("table", TABLES)
def test_every_entry_has_a_line(table, capsys):
    lines = shown(capsys, table).splitlines()
    assert [line.split()[0] for line in lines] == list(getattr(STUDY, table))
    assert all(len(line.split()) > 1 for line in lines)


def test_lines_tell_what_sets_an_entry_apart(capsys):
    for table, name, told in (
        ("variants", "ttt", "patch tokens alone, sincos positions  distilled by output; no mimetic, impulse"),
        ("inits", "fullcopy", "copies attention, mlp, norms, patch_embed, positions, class_token"),
        ("inits", "copy-map3e3", "distils map x 3000"),
        ("inits", "impulse", "impulse"),
        ("sizes", "mini", "4 blocks   64 wide   4 heads   4x4 patches    images 1x32x32"),
        ("sources", "fashion-trained", "mini: trained on fashion-mnist by fashion-source"),
        ("datasets", "pets", "37 classes     3,680 + 3,669 images       by transfer-long"),
        ("datasets", "imagenet-a", "out of distribution for imagenet"),
        ("recipes", "imagenet-base", "300 epochs (50 of warm-up)   batches of 4,096  lr 0.002  drop_path 0.1"),
        ("recipes", "fashion-quick", "2 epochs of align before"),
        ("grids", "demo", "11 runs     1 dataset, 1 size, 3 variants, 6 inits, 1 seed"),
    ):
        (line,) = (line for line in shown(capsys, table).splitlines() if line.split()[0] == name)
        assert line.endswith(told), line


@pytest.mark.parametrize("table", TABLES)
def test_an_entry_shown_whole_is_the_one_that_was_read(table, capsys):
    """The configuration with the shown entry in its place is the same configuration."""
    config = yaml.safe_load(CONFIG.read_text())
    for name in list(config[table])[:4]:
        config[table][name] = yaml.safe_load(shown(capsys, table, name))[name]
    assert study_from(config) == STUDY


def test_without_a_configuration_the_packages_own_entries_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for table, parts in (("variants", VARIANTS), ("inits", INITS), ("sizes", SIZES)):
        assert main(["show", table]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(parts)
    assert "no config.yaml here, which would tell of grids; name one by --config" in refusal(capsys, "show", "grids")


def test_what_is_not_there_is_told_with_what_was_meant(folder, capsys):
    assert "no table 'variant'; allowed: variants, inits" in refusal(capsys, "show", "variant")
    assert refusal(capsys, "show", "inits", "cpoy").endswith(
        "no init 'cpoy'; allowed: random, copy; did you mean 'copy'?"
    )


@pytest.mark.parametrize("command", ["show variants", "show grids", "--version", "--help", "convert --help", "plna"])
def test_no_torch_is_needed_to_look_around(folder, command):
    code = (
        "import sys\nfrom linvit.cli import main\n"
        f"try: main({command.split()})\nexcept SystemExit: pass\n"
        "print({'torch', 'timm', 'pandas', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert result.stdout.splitlines()[-1] == "set()"
