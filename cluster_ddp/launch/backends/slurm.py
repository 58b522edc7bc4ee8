"""Jobs on the cluster: sbatch, scontrol, scancel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.contract import File
from cluster_ddp.errors import SlurmError
from cluster_ddp.launch.backends import Held, submit_env
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.slurm.job_status import JobStatus

# The job waits with a start time that is far off, not with --hold: what is held, sbatch takes without looking whether
# any node can run it (seen, 22.05).
WAIT = "--begin=now+1hour"

_OWN_COMMENT = re.compile(r"^#SBATCH --com", re.MULTILINE)  # which sbatch takes for --comment


class Slurm:
    """The cluster whose commands are on the PATH."""

    script_name = File.BATCH_SCRIPT

    def hold(self, script: str, options: Sequence[str]) -> Held:
        """Submit a job that does not start yet.

        Raises:
            SlurmError: sbatch refused, in its words; or it did not answer in time, and the job is cancelled.
        """
        mark, env = f"cluster_ddp-{os.urandom(8).hex()}", submit_env.clean(os.environ)
        comment = [] if _OWN_COMMENT.search(script) else [f"--comment={mark}"]
        try:
            answer = commands.submit(text=script, options=[WAIT, *comment, *options], env=env)
        except SlurmError as error:
            if comment and isinstance(error.__cause__, subprocess.TimeoutExpired):
                raise _without_answer(mark, error) from error
            raise
        return Held(label=str(answer.job_id), cluster=answer.cluster)

    def release(self, held: Held, folder: Path, begin: str) -> None:
        """Let the scheduler have the job.

        Raises:
            SlurmError: the controller doesn't answer.
        """
        start = [f"JobId={held.label}", f"StartTime={begin}"]
        commands.run(["scontrol", *commands.on(held.cluster), "update", *start])

    def abandon(self, held: Held) -> None:
        """Cancel the job, which has not started.

        Raises:
            SlurmError: the controller doesn't answer; the job is then still there.
        """
        commands.run(["scancel", *commands.on(held.cluster), held.label])

    def cancel(self, label: str, cluster: str | None, folder: Path) -> None:
        """End the job, a whole array or one task of it.

        Raises:
            SlurmError: it isn't known (any more), isn't ours, or the controller doesn't answer.
        """
        commands.run(["scancel", *commands.on(cluster), label])

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        """From the controller; where it has forgotten the job, from the accounting.

        Raises:
            SlurmError: neither knows it, or the controller doesn't answer.
        """
        return job_status.job_statuses(label, cluster=cluster)


def _without_answer(mark: str, error: SlurmError) -> SlurmError:
    """Cancel the job that sbatch may have submitted before it was ended."""
    if commands.cancel_by_comment(mark):
        return SlurmError(error.asked, f"{error.found} The job that it had submitted is cancelled.", error.hint)
    found = f"{error.found} No job came of it within the same time; one that still comes would start in an hour."
    return SlurmError(error.asked, found, f"look for it later: squeue --me --format='%i %k' | grep {mark}")


def test_only(script: str, options: Sequence[str]) -> str:
    """What the scheduler would do with the job: its words, on when and where it would start.

    Raises:
        SlurmError: it would refuse.
    """
    argv = ["sbatch", "--test-only", *options]
    return commands.run(argv, env=submit_env.clean(os.environ), text=script, words_on_stderr=True).strip()
