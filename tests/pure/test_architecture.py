"""The rules of the architecture that a machine can keep: who imports whom, and sizes. In `make check`."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
import sources

from cluster_ddp.submission.frozen import frozen_agent

pytestmark = sources.TOGETHER
PACKAGE = Path(__file__).parents[2] / "cluster_ddp"
LEAVES = {"argument_parser", "errors", "option_form", "processes", "waiting_notice", "_version"}
# package -> the others that it may import; modules at the top, `cli` may import anything.
MAY_IMPORT = {
    "run": set(),
    "slurm": {"run"},
    "agent": {"run", "slurm"},
    "submission": {"agent", "run", "slurm"},
    "jobs": {"agent", "run", "slurm", "submission"},
    "remote": {"run", "submission"},
    "scaling": {"agent", "cli", "jobs", "run", "slurm", "submission"},
    "runtime": {"agent", "run", "slurm"},
    "doctor": {"agent", "jobs", "run", "runtime", "slurm", "submission"},
    "mnist": {"runtime"},
    "sandbox": {"run", "slurm"},
}
# What ranks share with the agent, as docs/explanation/architecture.md says; what forks them uses some more.
OF_RANKS = {"rank_notes", "channel", "channel_server", "first_failure"}
OF_FORK = {"supervision.signals", "task.seed_process"}
MODULE_LINES = 500  # a look: a module is one noun, whole, and never split to meet a number
FUNCTION_LINES = 45
OTHERS_OBJECTS = {"arguments", "info", "level", "namespace", "generator.bit_generator", "sys"}  # of libraries


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that one imports, wherever in it."""
    found = set()
    for node in sources.nodes(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return frozenset(name for name in found if name in MODULES)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_they_may(package: str) -> None:
    modules = [name for name in MODULES if name.split(".")[1:2] == [package]]
    assert modules
    for module in modules:
        others = {name.split(".")[1] for name in imports(module) if "." in name} - LEAVES - {package}
        assert others <= MAY_IMPORT[package], module


def test_modules_that_all_may_import_import_no_package() -> None:
    for module in LEAVES:
        assert {name.split(".")[1] for name in imports(f"cluster_ddp.{module}")} <= LEAVES, module


def test_ranks_and_the_fork_launcher_use_of_the_agent_what_they_share_with_it() -> None:
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for module in (name for name in MODULES if name.startswith("cluster_ddp.runtime.")):
        of_agent = {name for name in imports(module) if name.startswith("cluster_ddp.agent.")}
        found[".fork." in module] |= {name.removeprefix("cluster_ddp.agent.") for name in of_agent}
    assert found[False] == OF_RANKS
    assert found[True] - OF_RANKS == OF_FORK


def test_the_sandbox_could_be_a_package_of_its_own() -> None:
    for module in (name for name in MODULES if name.startswith("cluster_ddp.sandbox")):
        others = {name for name in imports(module) if not name.startswith("cluster_ddp.sandbox")}
        needed = ("errors", "run.names", "argument_parser", "slurm", "slurm.commands")  # as its README says
        assert others <= {f"cluster_ddp.{name}" for name in needed}, module
    assert imports("cluster_ddp.slurm.commands") <= {"cluster_ddp.errors", "cluster_ddp.waiting_notice"}


def test_ranks_write_to_the_run_directory_only_while_it_is_theirs() -> None:
    """A rank whose node was cut off may live on after a newer start of the job."""
    for module in (name for name in MODULES if ".runtime." in name and not name.endswith(".fenced_writes")):
        for node in sources.nodes(MODULES[module]):
            if isinstance(node, ast.ImportFrom) and node.module == "cluster_ddp.run.files":
                assert not {"open_own", "atomic_write"} & {alias.name for alias in node.names}, module
            assert not isinstance(node, ast.ImportFrom) or "files" not in {
                alias.name for alias in node.names if node.module == "cluster_ddp.run"
            }, module


def test_the_reference_workload_is_made_as_a_user_would_make_it() -> None:
    """Of the package's modules it imports the public face only; its options are checked without torch."""
    options = "cluster_ddp.mnist.train_config"
    for module in (name for name in MODULES if name.startswith("cluster_ddp.mnist.") and name != options):
        others = {name for name in imports(module) if name != "cluster_ddp" and ".mnist" not in name}
        assert others <= {"cluster_ddp.errors"}, module


def test_no_imports_run_in_a_circle() -> None:
    """Nor do those inside functions, or for type checkers."""
    left = {module: imports(module) - {module} for module in MODULES}
    while leaves := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in leaves}
    assert left == {}


def test_modules_are_short() -> None:
    assert not [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > MODULE_LINES]


@pytest.mark.parametrize(
    "package", sorted({path.parent for path in MODULES.values()} - {PACKAGE}), ids=lambda p: p.name
)
def test_the_map_of_a_package_is_true(package: Path) -> None:
    """Its docstring has a line for each module and each package in it, `name  what it is`, and no other."""
    text = ast.get_docstring(sources.tree(package / "__init__.py")) or ""
    names = re.findall(r"(?:^ *| {2,})((?:\w+/?, )*\w+/?)(?= {2,}\S)", text, re.MULTILINE)
    listed = {name.rstrip("/") for row in names for name in row.split(", ")}
    there = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert listed | {"__init__", "__main__"} == there | {"__init__", "__main__"}


def test_a_file_is_found_by_its_name() -> None:
    """No two modules have one name, but for those of verbs."""
    paths = [path for path in MODULES.values() if path.parent != PACKAGE / "cli" and path.stem[0] != "_"]
    twins = [path for path in paths if [other.stem for other in paths].count(path.stem) > 1]
    assert twins == []


def test_a_class_is_found_by_its_name() -> None:
    """No two classes have one name: a name means one thing."""
    names = [node.name for path in MODULES.values() for node in sources.nodes(path) if isinstance(node, ast.ClassDef)]
    assert [name for name in names if name[0] != "_" and names.count(name) > 1] == []


def test_only_run_opens_what_says_whose_a_run_directory_is() -> None:
    """spec.json, job.json, job.jsonl: elsewhere, calls at most ask whether they are there."""
    asks = {"exists", "lexists", "access", "append", "quote", "str", "resolve", "refuse_others"}
    for module in (one for one in MODULES if not one.startswith("cluster_ddp.run.")):
        for call in (node for node in sources.nodes(MODULES[module]) if isinstance(node, ast.Call)):
            parts = [*call.args, *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
            direct = [one.right if isinstance(one, ast.BinOp) else one for one in parts]
            named = [ast.unparse(one) for one in direct if isinstance(one, ast.Attribute)]
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
            found = {"File.SPEC", "File.JOB", "File.JOURNAL"} & {*named}
            assert not found or name in asks, f"{module}, line {call.lineno}: {name} of {found}"


def test_no_attribute_is_set_from_outside_its_class() -> None:
    """By its name: one that classes of other modules set, and none of this one. A method says what changes."""
    of_modules: dict[str, set[str]] = {}  # attribute -> modules whose classes have it
    for name, path in MODULES.items():
        classes = [node for node in sources.nodes(path) if isinstance(node, ast.ClassDef)]
        for node in (inner for one in classes for inner in ast.walk(one)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
                of_modules.setdefault(node.attr, set()).add(name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                of_modules.setdefault(node.target.id, set()).add(name)
    outside = [
        f"{name}: {ast.unparse(node)}"
        for name, path in MODULES.items()
        for node in sources.nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if not is_own(node) and ast.unparse(node.value) not in OTHERS_OBJECTS
        if name not in of_modules.get(node.attr, {name})
    ]
    assert not outside


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_functions_are_short() -> None:
    """Forty lines, with the docstring; those of tests are not counted, but make chaos' are."""
    folders = ("cluster_ddp", "scripts", "examples", "benchmarks", "tests/chaos")
    for path in (path for folder in folders for path in (PACKAGE.parent / folder).rglob("*.py")):
        for node in sources.nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < FUNCTION_LINES, f"{path}: {node.name}"


def test_the_agent_imports_only_what_is_frozen_with_it() -> None:
    """A job of one version may run for weeks on nodes where no other is installed. Its parts import no more either."""
    frozen = {f"cluster_ddp.{name.replace('/', '.')}" for name in frozen_agent.OTHERS}
    frozen |= {module for module in MODULES if module.split(".")[1:2] in (["agent"], ["run"])}
    for module in frozen:
        assert imports(module) <= frozen, module


@pytest.mark.parametrize("package", ["run", "slurm", "agent"])
def test_packages_that_jobs_begin_with_need_the_standard_library_only(package: str) -> None:
    for module in (PACKAGE / package).rglob("*.py"):
        for node in sources.nodes(module):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                tops = {name.split(".")[0] for name in names if name}
                assert tops <= {*sys.stdlib_module_names, "cluster_ddp"}, module
