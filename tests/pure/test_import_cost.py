"""What a look at a command costs: no heavy module, and the CPU time of a few imports."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest


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
        "from cluster_ddp.cli.submit import main; main(['--nodes', '2', '--gpus-per-node', '2', '--dry-run'])",
        "from cluster_ddp.cli.submit import main; main(['--dry-run', '--array', 'a=0..9', '--', 'ls', '{a}'])",
        "from cluster_ddp.cli.submit import main;"
        "main(['--dry-run', '--track', 'tensorboard', 'wandb', 'mlflow', '--', sys.executable, '-V'])",
        "import contextlib, cluster_ddp.cli.submit as s\nwith contextlib.suppress(SystemExit): s.main(['--help'])",
        "import cluster_ddp.mnist.train_config, cluster_ddp.mnist.data",
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
