"""What submission, runtime and the templates share is named in one place, and documented."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import sources

from cluster_ddp.run.names import Env, File, Record

pytestmark = sources.TOGETHER
ROOT = Path(__file__).parents[3]
PACKAGE, TEMPLATES, REFERENCE = ROOT / "cluster_ddp", ROOT / "templates", ROOT / "docs" / "reference"


def names_of(group: type) -> list[str]:
    return [value for key, value in vars(group).items() if key.isupper()]


FILES = [name for name in names_of(File) if "." in name]


MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def texts(module: Path) -> list[str]:
    """Strings of a module, without its docstrings."""
    nodes = sources.nodes(module)
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in statements]
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.parametrize("name", [*names_of(Env), *FILES])
def test_nobody_else_spells_a_name(name: str) -> None:
    """In messages to people it may stand."""
    spelled = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.])")
    for module in MODULES:
        if module != PACKAGE / "run" / "names.py":
            found = [text for text in texts(module) if name in text and spelled.search(text)]
            assert [text for text in found if " " not in text.strip()] == [], module


def test_the_templates_use_no_other_variable_and_spell_no_file() -> None:
    for template in TEMPLATES.iterdir():
        text = template.read_text()
        assert {*re.findall(r"CLUSTER_DDP_\w+", text)} - {"CLUSTER_DDP_"} <= {*names_of(Env)}, template
        assert [name for name in FILES if f"/{name}" in text] == [], template


@pytest.mark.parametrize(("page", "group"), [("environment-variables.md", Env), ("run-directory.md", File)])
def test_the_reference_has_each_name_and_no_other(page: str, group: type) -> None:
    text = (REFERENCE / page).read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted(name.replace("{}", "N") for name in names_of(group))


def test_the_reference_has_each_kind_of_record() -> None:
    text = (REFERENCE / "run-directory.md").read_text()
    assert re.findall(r"^- `(\w+)`:", text, flags=re.MULTILINE) == names_of(Record)
