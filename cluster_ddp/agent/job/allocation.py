"""What a shell of salloc lacks beside a batch script: it runs on a login node, and knows no node and no GPUs.

Where salloc starts its shell on the first node (LaunchParameters=use_interactive_step), nothing is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster_ddp.agent.job import scontrol
from cluster_ddp.errors import SpecError

_NODE = "SLURMD_NODENAME"
_GPUS = "SLURM_GPUS_ON_NODE"


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


def is_on_node(env: Mapping[str, str]) -> bool:
    """Whether a job's shell runs on a node of the job."""
    return _NODE in env
