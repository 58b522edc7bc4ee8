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
sys.path.append(str(TESTS.parent / "scripts"))
import render_faults  # noqa: E402

NAME = re.compile(r"`(test_\w+)`")


def test_a_group_of_tests_stays_in_one_process(tmp_path: Path) -> None:
    """pytest-xdist 3.8 loses the groups with pytest 9.2, in silence: each process then starts the jobs of all."""
    text = "import os, pathlib, pytest\n@pytest.mark.xdist_group('one')\n@pytest.mark.parametrize('number', range(4))\n"
    text += "def test_one(number):\n    pathlib.Path(os.environ['PYTEST_XDIST_WORKER']).touch()\n"
    (tmp_path / "test_group.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--dist=loadgroup", "-n2", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert len(list(tmp_path.glob("gw*"))) == 1


def test_make_test_has_what_readme_promises() -> None:
    """No test that README names is left to `make test-all`. docs/faults.md says so of its tests by itself."""
    named = set(NAME.findall((TESTS.parent / "README.md").read_text()))
    tests = (test for path in TESTS.rglob("test_*.py") for test in render_faults.tests_in(path, TESTS))
    assert [test.name for test in tests if test.is_full and test.name in named] == []


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
