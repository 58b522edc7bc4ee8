"""What a job's shell does not know, or knows of another job.

A shell of salloc runs on a login node, and knows no node and no GPUs. Where salloc starts it on the first node
(LaunchParameters=use_interactive_step), nothing is missing. A job that another job has submitted inherits what that
one is in its array, and how often it was restarted: Slurm replaces these variables only if the new job has them, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster_ddp.agent.job import scontrol
from cluster_ddp.errors import SpecError

_NODE = "SLURMD_NODENAME"
_GPUS = "SLURM_GPUS_ON_NODE"
_ARRAY, _TASK, _RESTARTS = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"


def completed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's shell with what a batch script has: the first node's name, the GPUs of a node.

    Args:
        env: that of the shell.

    Raises:
        SpecError: Slurm does not name the nodes of the job.
    """
    if _NODE in env:
        return dict(env)
    nodes = scontrol.ask(["scontrol", "show", "hostnames", env.get("SLURM_JOB_NODELIST", "")], env)
    if not nodes.is_ok or not nodes.words.split():
        found = f"scontrol show hostnames {env.get('SLURM_JOB_NODELIST', '')} names no node."
        raise SpecError(f"Finding the first node of job {env['SLURM_JOB_ID']}:", found, "in salloc, or sbatch SCRIPT")
    more = {_NODE: nodes.words.split()[0]}
    shown = scontrol.ask(["scontrol", "show", "job", env["SLURM_JOB_ID"]], env)
    gpus = re.search(r"\bTresPerNode=\S*?gpu(?::[^:=,\s]+)?[:=](\d+)", shown.words)
    return {**env, **more, **({_GPUS: gpus[1]} if gpus and _GPUS not in env else {})}


def own(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose array and restarts are this job's own, as Slurm says.

    Args:
        env: that of the job's shell. If Slurm does not answer, it counts.
    """
    if not env.keys() & {_ARRAY, _RESTARTS}:
        return dict(env)
    form = "JobID:20,ArrayJobID:20,ArrayTaskID:200,RestartCnt:20"
    answer = scontrol.ask(["squeue", "--noheader", f"--jobs={env['SLURM_JOB_ID']}", f"--Format={form}"], env)
    for line in answer.words.splitlines() if answer.is_ok else ():
        job, array, task, restarts = (line.split() + [""] * 4)[:4]
        if job == env["SLURM_JOB_ID"] and restarts.isdigit():
            in_array = {_ARRAY: array, _TASK: task} if task.isdigit() else {}
            kept = {name: value for name, value in env.items() if in_array or not name.startswith("SLURM_ARRAY_")}
            return {**kept, **in_array, _RESTARTS: restarts}
    return dict(env)


def is_on_node(env: Mapping[str, str]) -> bool:
    """Whether a job's shell runs on a node of the job."""
    return _NODE in env
