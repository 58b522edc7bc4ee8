"""Check before the submission that the job's Python has the libraries of its trackers. None is imported."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

from cluster_ddp.errors import SpecError
from cluster_ddp.launch.spec import JobSpec


def check(spec: JobSpec) -> None:
    """Look for each library where the job will import it. In a container, with modules or conda it can't be known.

    Args:
        spec: the job.

    Raises:
        SpecError: a library is missing.
    """
    if spec.container or spec.container_image or spec.conda_env or spec.modules:
        return
    venv = None if spec.venv is None or Path(spec.venv).resolve() == Path(sys.prefix).resolve() else Path(spec.venv)
    for name in spec.track:
        is_there = importlib.util.find_spec(name) is not None if venv is None else _is_in(venv, name)
        if not is_there:
            found = f"there is no library {name!r} in {venv or sys.prefix}."
            pip = "pip" if venv is None else f"{shlex.quote(str(venv))}/bin/pip"
            raise SpecError(f"Tracking with {name}:", found, f"{pip} install 'cluster-ddp[{name}]'")


def _is_in(venv: Path, name: str) -> bool:
    """Whether a virtual environment has a package. One that sees the system's packages may have it there."""
    with_system = "include-system-site-packages = true"
    config = venv / "pyvenv.cfg"
    if config.is_file() and with_system in config.read_text():
        return True
    return any(venv.glob(f"lib*/python*/site-packages/{name}/__init__.py")) or _has_paths(venv)


def _has_paths(venv: Path) -> bool:
    """Whether .pth files add other folders."""
    return any(
        line.startswith("/")
        for file in venv.glob("lib*/python*/site-packages/*.pth")
        for line in file.read_text(errors="replace").splitlines()
    )
