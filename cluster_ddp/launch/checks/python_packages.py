"""Check before the submission that the job's Python has the packages that our options need. None is imported."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from cluster_ddp.errors import SpecError
from cluster_ddp.launch import task_command
from cluster_ddp.launch.spec import JobSpec

_OURS = "cluster-ddp"
# A folder that only has the package's name is no package: it has no origin.
_CODE = """
import importlib.util, sys
print(sys.prefix)
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        print(name)
"""


class _Need(NamedTuple):
    package: str
    project: str
    """What pip installs it by."""
    asked: str
    instead: str = ""


def check(spec: JobSpec) -> None:
    """Ask the job's Python for each package. In a container, or with modules, conda or a setup, it can't be known.

    Args:
        spec: the job. Without a command it runs a function, with the present Python.

    Raises:
        SpecError: a package is missing.
    """
    needs = list(_needs(spec))
    if not needs or spec.container or spec.container_image or spec.conda_env or spec.modules or spec.setup:
        return
    task = task_command.of_command(spec)
    python = list(spec.command[: task.interpreter_words]) or [task.python]
    prefix, *missing = _ask(python, [need.package for need in needs], spec.venv) or ["", ""]
    for need in needs:
        if need.package in missing:
            found = f"there is no Python package {need.package!r} in {prefix}."
            pip = f"{shlex.quote(f'{prefix}/bin/python')} -m pip install {shlex.quote(need.project)}"
            raise SpecError(need.asked, found, pip + need.instead)


def _needs(spec: JobSpec) -> Iterator[_Need]:
    by_srun = "; or leave it to srun: --launcher srun"
    if spec.launcher == "fork":
        yield _Need("cluster_ddp", _OURS, "Starting the ranks by --launcher fork:", by_srun)
    if spec.launcher == "torchrun":
        yield _Need("torch", "torch", "Starting the ranks by --launcher torchrun:", by_srun)
    if spec.doctor:
        yield _Need("cluster_ddp", _OURS, "Running the doctor before the ranks:", "; or leave --doctor out")
    for name in spec.track:
        yield _Need(name, f"{_OURS}[{name}]", f"Tracking with {name}:")


def _ask(python: list[str], packages: list[str], venv: str | None) -> list[str]:
    """Return the folder of a Python, and which packages it lacks; nothing if it does not answer."""
    path = os.pathsep.join([*([f"{venv}/bin"] if venv else []), os.environ.get("PATH", os.defpath)])
    program = shutil.which(python[0], path=path)
    if program is None:
        return []  # another check says so
    command = [program, *python[1:], "-c", _CODE, *packages]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PATH": path},
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
