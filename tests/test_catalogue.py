"""The packaged catalogue is what `config.yaml` has: neither can change without the other."""

import subprocess
import sys

import models
import pytest

from linvit.catalogue import INITS, SIZES, VARIANTS, named
from linvit.config import ConfigError


def test_every_variant_of_the_configuration_is_packaged_and_no_other():
    assert models.STUDY.variants == VARIANTS


@pytest.mark.parametrize("name", INITS)
def test_an_initialisation_of_table_a_is_the_configurations(name):
    assert models.STUDY.inits[name] == INITS[name]


@pytest.mark.parametrize("name", SIZES)
def test_a_size_of_the_paper_is_the_configurations(name):
    assert models.STUDY.sizes[name] == SIZES[name]


def test_a_name_that_is_not_there_is_one_line_with_those_that_are():
    with pytest.raises(ConfigError) as caught:
        named(VARIANTS, "inlin", "variant")
    expected = "no variant 'inlin'; allowed: softmax, elu, relu, inline, mhla, ttt; did you mean 'inline'?"
    assert str(caught.value) == expected


def test_the_catalogue_needs_no_torch():
    code = "import linvit.catalogue, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
