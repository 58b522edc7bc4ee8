"""The rules of the tests: who runs them, and in which process."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import sources

TESTS = Path(__file__).parents[1]
NAME = re.compile(r"`(?:tests/[\w/]*/)?(test_\w+…?)(?:\.py)?`")


def test_a_group_of_tests_stays_in_one_process(tmp_path: Path) -> None:
    """pytest-xdist 3.8 loses the groups with pytest 9.2, in silence: each process then starts the jobs of all."""
    text = "import os, pathlib, pytest\n@pytest.mark.xdist_group('one')\n@pytest.mark.parametrize('number', range(4))\n"
    text += "def test_one(number):\n    pathlib.Path(os.environ['PYTEST_XDIST_WORKER']).touch()\n"
    (tmp_path / "test_group.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--dist=loadgroup", "-n2", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert len(list(tmp_path.glob("gw*"))) == 1


def test_make_test_has_what_documents_promise() -> None:
    """README and docs/faults.md name tests by their whole names, or their beginnings ("…").

    Those behind "in `make test-all`" are marked `full`, and no other.
    """
    lines = "".join((TESTS.parent / name).read_text() for name in ("README.md", "docs/faults.md")).splitlines()
    named = {is_later: set[str]() for is_later in (False, True)}
    for line in lines:
        first, _, later = line.partition("in `make test-all`")
        named[False].update(NAME.findall(first))
        named[True].update(NAME.findall(later))
    full, all_names = _names_of_tests()
    assert [one for name in named[False] for one in full if _is(name, one)] == []
    assert [name for name in named[True] if not any(_is(name, one) for one in full)] == []
    assert [name for name in named[False] if not any(_is(name, one) for one in all_names)] == []


def _names_of_tests() -> tuple[set[str], set[str]]:
    """Those of files and tests that are marked `full`, and of all."""
    full, all_names = set[str](), set[str]()
    for path in TESTS.rglob("test_*.py"):
        is_later = any(ast.unparse(node) == "pytestmark = pytest.mark.full" for node in sources.tree(path).body)
        functions = [node for node in sources.nodes(path) if isinstance(node, ast.FunctionDef)]
        tests = [one for one in functions if one.name.startswith("test_")]
        later = [one for one in tests if is_later or "pytest.mark.full" in map(ast.unparse, one.decorator_list)]
        full |= {one.name for one in later} | ({path.stem} if later == tests else set())
        all_names |= {one.name for one in tests} | {path.stem}
    return full, all_names


def _is(named: str, name: str) -> bool:
    return name.startswith(named[:-1]) if named.endswith("…") else name == named


def test_make_quick_has_a_test_of_each_package_with_ranks() -> None:
    folders = {path.parent for path in (TESTS / "ranks").rglob("test_*.py")} - {TESTS / "ranks"}
    quick = [path for path in (TESTS / "ranks").rglob("test_*.py") if "mark.quick" in path.read_text()]
    assert [folder for folder in folders if not any(folder in path.parents for path in quick)] == []


def test_no_test_sleeps() -> None:
    """It waits for an event by `wait_until`, or looks whether something `stays`. Stand-ins inside it may be slow."""
    found = []
    for path in TESTS.rglob("test_*.py"):
        tests = (node for node in sources.nodes(path) if isinstance(node, ast.FunctionDef))
        for test in (one for one in tests if one.name.startswith("test_")):
            calls = (node for node in own_nodes(test) if isinstance(node, ast.Call))
            found += [f"{path.name}:{one.lineno}" for one in calls if ast.unparse(one.func) == "time.sleep"]
    assert found == []


def test_who_waits_for_a_process_has_the_limit_of_all() -> None:
    """Such as `process.wait(timeout=scaled(LIMIT_S))`: a limit of its own is passed on a busy machine one day."""
    waits = {"wait", "communicate", "result", "results", "get", "run"}
    found = []
    for path in TESTS.rglob("test_*.py"):
        calls = [node for node in sources.nodes(path) if isinstance(node, ast.Call)]
        for call in (one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in waits):
            names = ("timeout",) if call.func.attr == "run" else ("timeout", "timeout_s")
            limits = [keyword.value for keyword in call.keywords if keyword.arg in names]
            numbers = [node for limit in limits for node in ast.walk(limit) if isinstance(node, ast.Constant)]
            found += [f"{path.name}:{call.lineno}"] if numbers else []
    assert found == []


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            left += ast.iter_child_nodes(node)
