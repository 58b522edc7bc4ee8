"""The house rules that a machine can keep: who imports whom, and what the doors may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cluster_ddp"
# room -> the rooms of the package that it may import; doors (modules at the top, and sandbox) may import anything.
MAY_IMPORT = {
    "slurm": {"slurm", "errors"},
    "launch": {"launch", "slurm", "errors", "files"},
    "runtime": {"runtime", "slurm", "errors", "files"},
    "mnist": {"mnist", "runtime", "errors", "files"},
}


def imported_rooms(module: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(module.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("cluster_ddp.")}
    return rooms


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_they_may(room: str) -> None:
    modules = sorted((PACKAGE / room).rglob("*.py"))
    assert modules
    for module in modules:
        assert imported_rooms(module) <= MAY_IMPORT[room], module


def test_slurm_needs_the_standard_library_only() -> None:
    for module in (PACKAGE / "slurm").glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                tops = {name.split(".")[0] for name in names if name}
                assert tops <= {*sys.stdlib_module_names, "cluster_ddp"}, module


@pytest.mark.parametrize(
    "command",
    [
        "import cluster_ddp",
        "from cluster_ddp.env import main; main([])",
        "from cluster_ddp.launch.render import render; from cluster_ddp.launch.spec import JobSpec;"
        "render(JobSpec(name='x', command=('true',)), source='')",
        "from cluster_ddp.sandbox.__main__ import parser; parser()",
        "import cluster_ddp.train",
        "import cluster_ddp.status",
        "from cluster_ddp.submit import main; main(['--nodes', '2', '--gpus-per-node', '2', '--dry-run'])",
        "from cluster_ddp.submit import main; main(['--dry-run', '--array', 'a=0..9', '--', 'ls', '{a}'])",
        "import contextlib\nwith contextlib.suppress(SystemExit): import cluster_ddp.submit as s; s.main(['--help'])",
        "import cluster_ddp.mnist.config, cluster_ddp.mnist.files",
    ],
)
def test_light_doors_import_no_heavy_module(command: str) -> None:
    heavy = ["torch", "torchvision", "numpy", "submitit", "pooch", "requests"]
    check = f"import sys; {command}; sys.exit(' '.join(m for m in {heavy} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (("cluster_ddp.train", "--help"), 6),
        (("cluster_ddp.submit", "--help"), 3),
        (("cluster_ddp.submit", "--nodes", "2", "--gpus-per-node", "2", "--dry-run"), 3),
    ],
)
def test_a_look_costs_no_more_than_a_few_imports(arguments: tuple[str, ...], limit: int) -> None:
    """In units of what the imports of argparse and jinja2 take; the best of some rounds, since others use the CPU."""
    imports, ours = ("-c", "import argparse, jinja2"), ("-m", *arguments)
    best_s = {imports: float("inf"), ours: float("inf")}
    for _ in range(40):
        for command in best_s:
            start = time.perf_counter()
            subprocess.run([sys.executable, *command], capture_output=True, check=True)
            best_s[command] = min(best_s[command], time.perf_counter() - start)
        if best_s[ours] < limit * best_s[imports]:
            return
    raise AssertionError(best_s)
