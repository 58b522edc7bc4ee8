"""Check before the submission that the job's Python has the packages that our options need. None is imported."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from cluster_ddp.agent.python_command import is_python, python_target
from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks import job_python
from cluster_ddp.submission.spec import JobSpec

_OURS = "cluster-ddp"
# A folder that only has the package's name is no package: it has no origin. Modules in a package are looked for without
# importing the package.
_CODE = """
import glob, importlib.util, os, sys
print(sys.prefix)
for name in sys.argv[1:]:
    first, *parts = name.split(".")
    found = importlib.util.find_spec(first)
    there = found is not None and (found.origin is not None or bool(parts))
    places = list(found.submodule_search_locations or []) if there and parts else []
    for part in parts:
        places = [path for place in places for path in glob.glob(os.path.join(glob.escape(place), part + "*"))]
        places = [path for path in places if os.path.basename(path).split(".")[0] == part]
    if not (places if parts else there):
        print(name)
"""


class _Need(NamedTuple):
    package: str
    project: str
    """What pip installs it by; empty for a module of the user's own."""
    asked: str
    instead: str = ""
    fields: tuple[str, ...] = ()
    """Fields of the job that it follows from."""


def check(spec: JobSpec) -> None:
    """Ask the job's Python for each package. In a container, or with modules, conda or a setup, it can't be known.

    Args:
        spec: the job. Without a command it runs a function, with the present Python.

    Raises:
        SpecError: a package is missing.
    """
    needs = list(_needs(spec))
    if not needs:
        return
    prefix, *missing = job_python.ask(spec, _CODE, [need.package for need in needs]) or ["", ""]
    for need in needs:
        if need.package in missing:
            found = f"there is no Python package {need.package!r} in {prefix}."
            if not need.project:
                hint = "check its name; a module of your own must be in the folder where you submit, or be installed"
                raise SpecError(need.asked, f"there is no Python module {need.package!r} in {prefix}.", hint)
            pip = f"{shlex.quote(f'{prefix}/bin/python')} -m pip install {shlex.quote(need.project)}"
            raise SpecError(need.asked, found, pip + need.instead).about(*need.fields)


def _needs(spec: JobSpec) -> Iterator[_Need]:
    by_srun = "; or leave it to srun: --launcher srun"
    if spec.launcher == "fork":
        yield _Need("cluster_ddp", _OURS, "Starting the ranks by --launcher fork:", by_srun, ("launcher",))
    if spec.launcher == "torchrun":
        yield _Need("torch", "torch", "Starting the ranks by --launcher torchrun:", by_srun, ("launcher",))
    if spec.doctor:
        yield _Need("cluster_ddp", _OURS, "Running the doctor before the ranks:", "; or leave --doctor out")
    if is_python(spec.command) and (target := python_target(spec.command)).kind == "module" and target.words:
        module = target.words[0]
        if "{" not in module:
            yield _Need(module, "", f"Running {shlex.join(spec.command)}:")
    for name in spec.track:
        yield _Need(name, f"{_OURS}[{name}]", f"Tracking with {name}:")
