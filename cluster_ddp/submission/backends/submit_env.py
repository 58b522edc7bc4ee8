"""The environment that a new job inherits: the submitting shell's, without the variables of a job around it."""

from __future__ import annotations

from collections.abc import Mapping

from cluster_ddp.agent.job import allocation
from cluster_ddp.protocol import Env

# Variables of a job or a step. sbatch and srun read many of them as options (sbatch(1), INPUT ENVIRONMENT VARIABLES).
_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_")
_KEPT = frozenset(["SLURM_CONF", "SLURM_JWT"])
# Slurm sets these in a job. Outside a job they are the user's own.
_OF_A_JOB = frozenset(["CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, and so for the job."""
    in_a_job = "SLURM_JOB_ID" in env
    return {name: value for name, value in env.items() if not _is_foreign(name, in_a_job)}


def ignored_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the user's shell that set sbatch's options or the run directory. `clean` removes them."""
    in_a_job = "SLURM_JOB_ID" in env
    return {name: value for name, value in env.items() if name.startswith(("SBATCH_", Env.RUN_DIR)) and not in_a_job}


def _is_foreign(name: str, in_a_job: bool) -> bool:
    if name in _KEPT:
        return False
    return name.startswith(_PREFIXES) or allocation.is_of_ranks(name) or (in_a_job and name in _OF_A_JOB)
