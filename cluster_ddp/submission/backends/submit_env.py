"""The environment that a new job inherits: the submitting shell's, without the variables of a job around it."""

from __future__ import annotations

from collections.abc import Mapping

from cluster_ddp.contract import Env

# Variables of a job, a step or a rank. sbatch and srun read many of them as options (sbatch(1), INPUT ENVIRONMENT
# VARIABLES), and a rank would take the others for its own.
_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "SUBMITIT_")
_NAMES = frozenset(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", Env.RUN_DIR, Env.SECRET),
        *(Env.RESUME, Env.LOCAL_JOB_ID, Env.JOB_TIMES, Env.TRACE, Env.TRACK, Env.NOTES, Env.CHANNEL, Env.COPY),
    ]
)
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
    return name.startswith(_PREFIXES) or name in _NAMES or (in_a_job and name in _OF_A_JOB)
