"""Whether the tasks fit the GPUs, and each task sees its own."""

from __future__ import annotations

from collections.abc import Iterator

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.runtime.device import visible_gpus
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_NONE = ("", "-1", "NoDevFiles")


@check(detects="a step of one task in a job of several, such as the shell of `srun --pty`", on="rank")
def one_task_step(site: Site) -> Iterator[Finding]:
    """Look for a step that has one of the job's tasks."""
    v = Variables(site.env)
    tasks = (v.integer(*variables.NTASKS_PER_NODE) or 1) * (v.integer(*variables.JOB_NODES) or 1)
    if site.topology.launcher == "slurm" and site.topology.world_size == 1 and tasks > 1:
        yield Finding(
            check="one_task_step",
            what=f"This step has 1 task, and the job has {tasks}.",
            evidence=v.shown("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES"),
            hint=f"start all tasks: srun --ntasks={tasks} python …; in srun --pty: srun --overlap --ntasks={tasks} …",
            is_warning=True,
        )


@check(detects="GPUs that Slurm gave and a variable hides from the task", on="rank")
def hidden_gpus(site: Site) -> Iterator[Finding]:
    """Look for an empty CUDA_VISIBLE_DEVICES and the like."""
    gpus = site.topology.gpus_on_node or 0
    for name in visible_gpus.NAMES:
        if gpus and name in site.env and site.env[name].strip() in _NONE:
            yield Finding(
                check="hidden_gpus",
                what=f"{name} hides the GPUs that Slurm gave.",
                evidence=f"{name}={site.env[name]!r}, SLURM_GPUS_ON_NODE={gpus}",
                hint=f"unset {name} in the batch script and in your shell's start files; Slurm sets it",
            )


@check(detects="a GPU that is listed twice for a task", on="rank")
def gpu_listed_twice(site: Site) -> Iterator[Finding]:
    """Look for repeated entries in CUDA_VISIBLE_DEVICES and the like."""
    for name in visible_gpus.NAMES:
        entries = [entry.strip() for entry in site.env.get(name, "").split(",") if entry.strip()]
        if len(set(entries)) < len(entries):
            yield Finding(
                check="gpu_listed_twice",
                what=f"{name} lists a GPU twice.",
                evidence=f"{name}={site.env[name]}",
                hint=f"remove what sets {name}: grep -rn {name} ~/.bashrc ~/.profile and the batch script",
            )
