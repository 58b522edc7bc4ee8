"""Whether a task got what was asked for: its place, GPUs and CPUs, and a Python with torch. torch is not imported."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.doctor.checks.check_types import Site, node_check, rank_check
from cluster_ddp.doctor.findings import Finding
from cluster_ddp.runtime.device import binding
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_NONE = ("", "-1", "NoDevFiles")


@rank_check
def one_task_step(site: Site) -> Iterator[Finding]:
    """Detect a step of one task in a job of several, such as the shell of `srun --pty`."""
    v = Variables(site.env)
    tasks = (v.integer(*variables.NTASKS_PER_NODE) or 1) * (v.integer(*variables.JOB_NODES) or 1)
    if site.topology.launcher == "slurm" and site.topology.world_size == 1 and tasks > 1:
        yield Finding(
            what=f"This step has 1 task, and the job has up to {tasks}.",
            evidence=v.shown("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES"),
            hint=f"start all tasks: srun --ntasks={tasks} python …; in srun --pty: srun --overlap --ntasks={tasks} …",
            is_warning=True,
        )


@rank_check
def hidden_gpus(site: Site) -> Iterator[Finding]:
    """Detect GPUs that Slurm gave and a variable hides from the task."""
    gpus = site.topology.gpus_on_node or 0
    for name in binding.GPU_VARIABLES:
        if gpus and name in site.env and site.env[name].strip() in _NONE:
            yield Finding(
                what=f"{name} hides the GPUs that Slurm gave.",
                evidence=f"{name}={site.env[name]!r}, SLURM_GPUS_ON_NODE={gpus}",
                hint=f"unset {name} in the batch script and in your shell's start files; Slurm sets it",
            )


@rank_check
def gpu_listed_twice(site: Site) -> Iterator[Finding]:
    """Detect a GPU that is listed twice for a task."""
    for name in binding.GPU_VARIABLES:
        entries = [entry.strip() for entry in site.env.get(name, "").split(",") if entry.strip()]
        if len(set(entries)) < len(entries):
            yield Finding(
                what=f"{name} lists a GPU twice.",
                evidence=f"{name}={site.env[name]}",
                hint=f"remove what sets {name}: grep -rn {name} ~/.bashrc ~/.profile and the batch script",
            )


@rank_check
def fewer_cpus(site: Site) -> Iterator[Finding]:
    """Detect a task that may use fewer CPUs than it asked for."""
    asked, usable = site.topology.cpus_per_task or 1, sorted(os.sched_getaffinity(0))
    if len(usable) < min(asked, os.cpu_count() or asked):
        yield Finding(
            what=f"Tasks may use fewer CPUs than they asked for: {len(usable)} of {asked}.",
            evidence=f"SLURM_CPUS_PER_TASK={asked}, CPU affinity {usable}",
            hint=f"srun --cpus-per-task={asked} (Slurm 22.05 to 23.02 does not take it from the job); no taskset",
            is_warning=True,
        )


@node_check
def too_many_threads(site: Site) -> Iterator[Finding]:
    """Detect more threads than CPUs: OMP_NUM_THREADS times the ranks of the node."""
    text = site.env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    cpus = max(len(os.sched_getaffinity(0)), site.ranks_here * (site.topology.cpus_per_task or 1))
    if text.isdigit() and int(text) > 1 and int(text) * site.ranks_here > cpus:
        yield Finding(
            what="The ranks of a node start more threads than it has CPUs for them.",
            evidence=f"OMP_NUM_THREADS={text}, {site.ranks_here} ranks here, {cpus} CPUs for them",
            hint=f"export OMP_NUM_THREADS={max(1, cpus // site.ranks_here)}, or ask for more: --cpus-per-task {text}",
            is_warning=True,
        )


def torch_versions() -> dict[str, str] | None:
    """Return torch's version, CUDA version ("None" for the CPU build) and folder; None if it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        text = ""
    found = {"folder": str(folder)}
    for name, key in (("__version__", "version"), ("cuda", "cuda"), ("hip", "hip")):
        if match := re.search(rf"^{name}\b.*?=\s*'?([^'\n]+)'?", text, re.MULTILINE):
            found[key] = match[1].strip()
    return found


@node_check
def torch_build(site: Site) -> Iterator[Finding]:
    """Detect a Python without torch, or torch's CPU build on nodes with GPUs."""
    found = torch_versions()
    if found is None:
        yield Finding(
            what="This Python has no torch.",
            evidence=f"{sys.executable} (Python {sys.version.split()[0]})",
            hint="activate your environment in the batch script: --venv PATH, --conda-env NAME or --setup 'source …'",
        )
    elif site.real_gpus and {found.get("cuda"), found.get("hip")} <= {"None", None}:
        yield Finding(
            what="This torch has no GPU support.",
            evidence=f"torch {found.get('version')} in {found['folder']}, GPUs here: {site.topology.gpus_on_node}",
            hint="install the build for your CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )


@node_check
def other_environment(site: Site) -> Iterator[Finding]:
    """Detect a Python outside of the environment that was activated."""
    wanted = site.env.get("VIRTUAL_ENV")
    if not wanted:
        return
    if not Path(wanted).is_dir():
        yield Finding(
            what="The virtual environment is not on a node.",
            evidence=f"VIRTUAL_ENV={wanted}: no such folder",
            hint="put it on a file system that all nodes share, or: cluster-ddp submit --stage-env",
            sick_nodes=(site.host,),
        )
    elif Path(wanted).resolve() != Path(sys.prefix).resolve():
        yield Finding(
            what="Another Python runs than that of the activated environment.",
            evidence=f"VIRTUAL_ENV={wanted}, but Python runs from {sys.prefix}",
            hint="activate it last in the batch script: module load puts its own python first; type -a python",
            is_warning=True,
        )
