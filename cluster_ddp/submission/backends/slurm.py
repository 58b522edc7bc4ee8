"""Jobs on the cluster: sbatch, scontrol, scancel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_ddp.agent.job import shell_env
from cluster_ddp.errors import JobNotFoundError, SlurmError
from cluster_ddp.protocol import Env, File
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends import Held, identity

# The job waits with a late start time, not with --hold: sbatch accepts a held job without checking whether any node can
# run it (seen with 22.05).
WAIT = "--begin=now+1hour"

# Variables of a job or a step. sbatch and srun read many of them as options (sbatch(1), INPUT ENVIRONMENT VARIABLES).
_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_")
_KEPT = ("SLURM_CONF", "SLURM_JWT")
# Slurm sets these in a job. Outside a job they are the user's own.
_OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

_OWN_COMMENT = re.compile(r"^#SBATCH --com", re.MULTILINE)  # sbatch accepts it as --comment


class Slurm:
    """The cluster whose commands are on the PATH."""

    script_name = File.BATCH_SCRIPT

    def test_only(self, script: str, options: Sequence[str]) -> str:
        """Ask the scheduler when and where the job would start (sbatch --test-only). Returns its words.

        Raises:
            SlurmError: it would refuse the job, or does not answer.
        """
        argv = ["sbatch", "--test-only", *options]
        return commands.run(argv, env=inherited_environment(os.environ), text=script, words_on_stderr=True).strip()

    def hold(self, script: str, options: Sequence[str]) -> Held:
        """Submit a job that does not start yet.

        Raises:
            SlurmError: sbatch refused; or it did not answer in time. The job is then cancelled if squeue shows it; the
                error says which.
        """
        mark, env = job_status.OUR_COMMENTS + os.urandom(8).hex(), inherited_environment(os.environ)
        comment = [] if _OWN_COMMENT.search(script) else [f"--comment={mark}"]
        try:
            answer = commands.submit(text=script, options=[WAIT, *comment, *options], env=env)
        except SlurmError as error:
            if comment and isinstance(error.__cause__, subprocess.TimeoutExpired):
                raise _without_answer(mark, error) from error
            raise
        known = {"comment": mark} if comment else {}
        return Held(label=str(answer.job_id), cluster=answer.cluster, identity=known)

    def release(self, held: Held, folder: Path, begin: str) -> None:
        """Let the scheduler start the job from `begin` on.

        Raises:
            SlurmError: the controller refuses or doesn't answer.
        """
        start = [f"JobId={held.label}", f"StartTime={begin}"]
        commands.run(["scontrol", *commands.on(held.cluster), "update", *start])

    def abandon(self, held: Held) -> None:
        """Cancel the job, which has not started.

        Raises:
            SlurmError: the controller doesn't answer. The job then still exists.
        """
        commands.run(["scancel", *commands.on(held.cluster), held.label])

    def cancel(self, label: str, cluster: str | None, folder: Path) -> None:
        """Cancel the job: a single job, a whole array or one task of it.

        Raises:
            SlurmError: scancel failed: the job is unknown or another user's, or the controller doesn't answer; or the
                id is another job's now.
        """
        self.statuses(label, cluster, folder)  # of an unknown job, scancel says nothing (22.05)
        commands.run(["scancel", *commands.on(cluster), label])

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        """Ask the controller; if it has forgotten the job, ask the accounting.

        Raises:
            JobNotFoundError: neither knows the job, or the id is another job's now.
            SlurmError: the controller doesn't answer.
        """
        found, known = job_status.job_statuses(label, cluster=cluster), identity.of(folder, label)
        ours = [one for one in found if known.is_of(one)]
        if found and not ours:
            words = f"Slurm no longer knows it: job {label} is another job now, not that of this run directory."
            raise JobNotFoundError(f"The job of {folder}:", words, f"if you mean that one: scontrol show job {label}")
        return ours


def _without_answer(mark: str, error: SlurmError) -> SlurmError:
    """Cancel the job that sbatch may have submitted before it was ended."""
    if commands.cancel_by_comment(mark):
        return SlurmError(error.asked, f"{error.found} It had submitted the job, which is now cancelled.", error.hint)
    found = f"{error.found} squeue shows no job of it so far. A job that still appears would start in an hour."
    return SlurmError(error.asked, found, f"look for it later: squeue --me --format='%i %k' | grep {mark}")


def inherited_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a new job inherits: this shell's, without the variables of a job around it."""
    return {name: value for name, value in env.items() if name in _KEPT or not _is_of_a_job(name, env)}


def _is_of_a_job(name: str, env: Mapping[str, str]) -> bool:
    return name.startswith(_PREFIXES) or shell_env.is_of_ranks(name) or (name in _OF_A_JOB and "SLURM_JOB_ID" in env)


def ignored_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the user's shell that set sbatch's options or the run directory. No job inherits them."""
    in_a_job = "SLURM_JOB_ID" in env
    return {name: value for name, value in env.items() if name.startswith(("SBATCH_", Env.RUN_DIR)) and not in_a_job}
