"""The rules of the architecture that a machine can keep: who imports whom, and what an entry point may cost."""

from __future__ import annotations

import ast
import functools
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import sources

from cluster_ddp.submission.frozen import frozen_agent

pytestmark = sources.TOGETHER
PACKAGE = Path(__file__).parents[2] / "cluster_ddp"
TESTS = Path(__file__).parents[1]
LEAVES = {
    *("argument_parser", "errors", "files", "ownership", "processes", "protocol", "run_files", "waiting_notice"),
    "_version",
}
# package -> the others that it may import; modules at the top, `cli` may import anything.
MAY_IMPORT = {
    "slurm": set(),
    "agent": {"slurm"},
    "submission": {"agent", "slurm"},
    "jobs": {"agent", "slurm", "submission"},
    "remote": {"submission"},
    "scaling": {"agent", "jobs", "slurm", "submission", "submit"},
    "runtime": {"agent", "slurm"},
    "doctor": {"agent", "jobs", "runtime", "slurm", "submission", "submit"},
    "mnist": {"runtime", "train_options"},
    "sandbox": {"slurm"},
}
# What ranks share with the agent, as docs/explanation/architecture.md says; the fork launcher uses some more.
OF_RANKS = {"rank_notes", "channel", "channel_server", "outcome", "first_failure", "job_file", "job.restart.fence"}
OF_FORK = {"option_types", "task.supervisor", "task.signals", "task.no_process_group", "task.warm_process"}
MODULES_SIDE_BY_SIDE = 12
MODULE_LINES = 250
FUNCTION_LINES = 40


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
        needed = ("errors", "protocol", "argument_parser", "slurm", "slurm.commands")  # as its README says
        assert others <= {f"cluster_ddp.{name}" for name in needed}, module
    assert imports("cluster_ddp.slurm.commands") <= {"cluster_ddp.errors", "cluster_ddp.waiting_notice"}


def test_ranks_write_to_the_run_directory_only_while_it_is_theirs() -> None:
    """A rank whose node was cut off may live on after a newer start of the job."""
    for module in (name for name in MODULES if ".runtime." in name and not name.endswith(".fenced_writes")):
        for node in sources.nodes(MODULES[module]):
            if isinstance(node, ast.ImportFrom) and node.module == "cluster_ddp.files":
                assert not {"open_own", "atomic_write"} & {alias.name for alias in node.names}, module
            assert not isinstance(node, ast.ImportFrom) or "files" not in {
                alias.name for alias in node.names if node.module == "cluster_ddp"
            }, module


def test_the_reference_workload_is_made_as_a_user_would_make_it() -> None:
    """Of the package's modules it imports the public face only, and its options, which are checked without torch."""
    for module in (name for name in MODULES if name.startswith("cluster_ddp.mnist.")):
        others = {name for name in imports(module) if name != "cluster_ddp" and ".mnist" not in name}
        assert others <= {"cluster_ddp.errors", "cluster_ddp.train_options"}, module


def test_no_imports_run_in_a_circle() -> None:
    """Nor do those inside functions, or for type checkers."""
    left = {module: imports(module) - {module} for module in MODULES}
    while leaves := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in leaves}
    assert left == {}


def test_no_package_has_too_many_modules_side_by_side() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        modules = [path.stem for path in folder.glob("*.py") if path.stem[0] != "_"]
        assert len(modules) <= MODULES_SIDE_BY_SIDE, folder


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


def test_a_group_of_tests_stays_in_one_process(tmp_path: Path) -> None:
    """pytest-xdist 3.8 loses the groups with pytest 9.2, in silence: each process then starts the jobs of all."""
    text = "import os, pathlib, pytest\n@pytest.mark.xdist_group('one')\n@pytest.mark.parametrize('number', range(4))\n"
    text += "def test_one(number):\n    pathlib.Path(os.environ['PYTEST_XDIST_WORKER']).touch()\n"
    (tmp_path / "test_group.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--dist=loadgroup", "-n2", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert len(list(tmp_path.glob("gw*"))) == 1


def test_make_test_has_what_documents_promise() -> None:
    """What README and docs/faults.md name, by its whole name or its beginning, is not for `make test-all` only."""
    promised = "".join((TESTS.parent / name).read_text() for name in ("README.md", "docs/faults.md"))
    named = re.findall(r"`(?:tests/[\w/]*/)?(test_\w+)(?:\.py)?(…?)`", promised)
    whole, beginnings = ({name for name, more in named if bool(more) == is_beginning} for is_beginning in (False, True))
    later = []
    for path in TESTS.rglob("test_*.py"):
        module = ast.parse(path.read_text())
        is_later = any(ast.unparse(node) == "pytestmark = pytest.mark.full" for node in module.body)
        tests = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        later += [path.stem] if is_later else []
        later += [
            node.name for node in tests if is_later or "pytest.mark.full" in map(ast.unparse, node.decorator_list)
        ]
    assert [one for one in later if one in whole or one.startswith(tuple(beginnings))] == []


def test_make_quick_has_a_test_of_each_package_with_ranks() -> None:
    folders = {path.parent for path in (TESTS / "ranks").rglob("test_*.py")} - {TESTS / "ranks"}
    quick = [path for path in (TESTS / "ranks").rglob("test_*.py") if "mark.quick" in path.read_text()]
    assert [folder for folder in folders if not any(folder in path.parents for path in quick)] == []


def test_a_file_is_found_by_its_name() -> None:
    """No two modules have one name, but for those of verbs."""
    paths = [path for path in MODULES.values() if path.parent != PACKAGE / "cli" and path.stem[0] != "_"]
    twins = [path for path in paths if [other.stem for other in paths].count(path.stem) > 1]
    assert twins == []


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
    for module in MODULES:
        if module.startswith("cluster_ddp.agent") or module in frozen:
            others = {name for name in imports(module) if not name.startswith("cluster_ddp.agent")}
            assert others <= frozen, module


@pytest.mark.parametrize("package", ["slurm", "agent"])
def test_slurm_and_the_agent_need_the_standard_library_only(package: str) -> None:
    for module in (PACKAGE / package).rglob("*.py"):
        for node in sources.nodes(module):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                tops = {name.split(".")[0] for name in names if name}
                assert tops <= {*sys.stdlib_module_names, "cluster_ddp"}, module


@pytest.mark.parametrize(
    "command",
    [
        "import cluster_ddp",
        "from cluster_ddp.cli.env import main; main([])",
        "from cluster_ddp.submission.render import agent_options, render;"
        "from cluster_ddp.submission.spec import JobSpec;"
        "spec = JobSpec(name='x', command=('true',)); render(spec, agent_options(spec), source='')",
        "from cluster_ddp.cli.launch import main; main(['--ranks', '2', '--dry-run', '--', 'python', '-V'])",
        "from cluster_ddp.sandbox.__main__ import parser; parser()",
        "import cluster_ddp.train",
        "import cluster_ddp.cli.status",
        "import cluster_ddp.cli.memory as m; m.parser()",
        "import cluster_ddp.cli.export as e; e.parser()",
        "from cluster_ddp.submit import main; main(['--nodes', '2', '--gpus-per-node', '2', '--dry-run'])",
        "from cluster_ddp.submit import main; main(['--dry-run', '--array', 'a=0..9', '--', 'ls', '{a}'])",
        "from cluster_ddp.submit import main;"
        "main(['--dry-run', '--track', 'tensorboard', 'wandb', 'mlflow', '--', sys.executable, '-V'])",
        "import contextlib\nwith contextlib.suppress(SystemExit): import cluster_ddp.submit as s; s.main(['--help'])",
        "import cluster_ddp.train_options, cluster_ddp.mnist.idx_files",
    ],
)
def test_light_entry_points_import_no_heavy_module(command: str) -> None:
    heavy = ["torch", "torchvision", "numpy", "submitit", "pooch", "requests", "tensorboard", "wandb", "mlflow"]
    check = f"import sys; {command}; sys.exit(' '.join(m for m in {heavy} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (("cluster_ddp.train", "--help"), 6),
        (("cluster_ddp.submit", "--help"), 3),
        (("cluster_ddp.submit", "--nodes", "2", "--gpus-per-node", "2", "--dry-run"), 3.5),
    ],
)
def test_a_look_costs_no_more_than_a_few_imports(arguments: tuple[str, ...], limit: float) -> None:
    """In units of the CPU time that importing argparse and jinja2 takes; the best of some rounds."""
    imports, ours = ("-c", "import argparse, jinja2"), ("-m", *arguments)
    best_s = {imports: float("inf"), ours: float("inf")}
    for _ in range(40):
        for command in best_s:
            start_s = _cpu_s_of_children()
            subprocess.run([sys.executable, *command], capture_output=True, check=True)
            best_s[command] = min(best_s[command], _cpu_s_of_children() - start_s)
        if best_s[ours] < limit * best_s[imports]:
            return
    raise AssertionError(best_s)
