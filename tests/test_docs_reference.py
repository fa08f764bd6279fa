"""The documentation's reference against the code: keys, names and formulas are all there, quoted messages are said."""

import ast
import re
from pathlib import Path

import config_keys

import linvit
from linvit.catalogue import INITS, VARIANTS
from linvit.config import DISTANCES
from linvit.results import DTYPES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_every_key_of_the_configuration_is_described():
    for title, model in config_keys.sections().items():
        missing = set(model.model_fields) - {"name"} - set(config_keys.descriptions(model))
        assert not missing, f"{title}: a text is missing under {', '.join(sorted(missing))}"


def test_the_page_of_keys_is_that_of_the_models():
    assert config_keys.PAGE.read_text() == config_keys.page(), "run python docs/_ext/config_keys.py"


def test_every_operator_initialisation_and_loss_is_explained():
    text = (DOCS / "operators.md").read_text()
    for variant in VARIANTS:
        assert re.search(rf"^### .*\b{variant}\b", text, re.MULTILINE), variant
    for name in (*INITS, *DISTANCES, *(distance for distances in DISTANCES.values() for distance in distances)):
        assert re.search(rf"^\|.*`{name}`", text, re.MULTILINE), name


def test_every_public_name_and_every_column_of_a_table_of_runs_is_explained():
    api, results = ((DOCS / page).read_text() for page in ("api.md", "results.md"))
    assert sorted(re.findall(r"^\.\. auto\w+:: linvit\.(\w+)", api, re.MULTILINE)) == linvit.__all__
    assert not [column for column in DTYPES if f"`{column}`" not in results]


def literals_of(folder: Path) -> str:
    """All texts in the code of a folder, a line each, with … for what is filled in."""
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd.\d]*[sdg]|\{\}", "…", node.value))
    return "\n".join(found)


def test_messages_that_are_explained_are_those_of_the_code():
    said = literals_of(ROOT / "linvit") + literals_of(ROOT / "workflow")
    told = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(told) > 40
    assert not [message for message in told if message not in said]
