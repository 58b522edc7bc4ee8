"""A job of Slurm, on its batch host: starts the ranks, says how they ended, and has the job requeued if it may be."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from contextlib import AbstractContextManager
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.job import chain, job_log, slurm_commands, srun_step, tasks
from cluster_ddp.agent.job.job_setup import JobSetup
from cluster_ddp.agent.job.restart import requeue
from cluster_ddp.agent.job.restart.failures import History
from cluster_ddp.agent.job.restart.requeue import Requeue
from cluster_ddp.agent.job.start_loop import Starts
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.errors import SpecError
from cluster_ddp.run.names import RESTART, Then
from cluster_ddp.run.outcome import Outcome


class SlurmJob(JobSetup):
    """A job of Slurm, from one requeue to the next."""

    def run(self) -> int:
        """Start the ranks, wait for their end, and do what follows from it. Returns the exit status.

        Raises:
            SpecError: srun is not there.
        """
        if shutil.which("srun", path=self.env.get("PATH")) is None:
            hint = "after module purge, load Slurm's module again; or extend the PATH"
            raise SpecError("Starting the ranks of the job:", "srun is not on the PATH.", hint)
        history = History(self.records, self.label, is_first=not self.requeues, shared=self.options.share)
        if self.requeues:
            job_log.say(f"{RESTART}{self.requeues + history.restarts} of job {self.env['SLURM_JOB_ID']}.")
        for number in tasks.HELD:
            signal.signal(number, lambda number, frame: self.early.append(number))
        with contextlib.closing(history):
            with rank_notes.folder() as folder, self.times_noted(folder / "job-times"):
                _leave_nothing(folder, history, ranks_too=self.env.get("ENVIRONMENT") != "BATCH")
                self.env |= srun_step.staged(self.options, self.size, self.env)
                starts = Starts(self, Notes(folder), history)
                ended = starts.run()
            srun_step.clean_up(self.options, self.env, ended.status)
            starts_again = self._starts_again(ended, starts, history)
        if not starts_again:
            job_log.show_how_to_resume(ended.status, self.env)
        return ended.status

    def times_noted(self, path: Path) -> AbstractContextManager[None]:
        """Note its start and its end in a file, for rank 0. See `slurm_commands.times_noted`."""
        return slurm_commands.times_noted(self.job, self.env, path)

    def _starts_again(self, ended: Outcome, starts: Starts, history: History) -> bool:
        """Have the job requeued, or its chain continued, if it may be. Returns whether that will be so.

        It is noted before: Slurm ends this process soon after it has accepted a requeue.
        """
        why = ""
        if left := self.left(ended):
            job_log.say(left)
            return True
        if ended.status and self.is_over:  # it may be queued again already, by somebody else
            job_log.say(requeue.SCRIPT_ENDED)
        elif starts.follows.then == Then.REQUEUE:
            why = f"Failed with status {ended.status}"
        elif ended.state == "STOPPED" and starts.status == 0:
            job_log.say(requeue.NOT_FINISHED)
        elif ended.state == "STOPPED" and requeue.may_restart(self.requeues, self.options.max_requeues):
            why = "Stopped in time"
        if ended.status and not self.is_over and (self.link is not None or not why) and (over := self.over()):
            job_log.say(over)
            return True  # the run directory is that start's
        if ended.state == "STOPPED":
            history.end(ended._replace(then=Then.REQUEUE if why else Then.END))
        again = self.start_again(why, starts)
        if not again and (why or starts.follows.then == Then.REQUEUE):
            history.end(ended._replace(then=Then.END))
        return again

    def start_again(self, why: str, starts: Starts) -> bool:
        """Have the job requeued, or its chain continued or ended. `why` is empty if its training is not to continue.

        Returns:
            Whether it will continue.
        """
        recovery = starts.recovery
        leave, nodes, needed = recovery.left_behind(starts.follows), recovery.nodes_given_back, recovery.needed
        if self.link is not None:
            return chain.end(self.env, self.link, why, leave=leave, needed=needed, most=self.options.max_requeues)
        if not why:
            return False
        return Requeue(self.label, self.env, leave=leave, nodes=nodes, needed=needed).ask(why, starts.number + 1)


def _leave_nothing(folder: Path, history: History, *, ranks_too: bool) -> None:
    """TERM ends this process as it did before, but first removes a folder, and notes the end.

    `ranks_too`: srun gets TERM, too, and kills the ranks. Of a batch job Slurm itself ends them, and gives them more
    time; an allocation of salloc continues.
    """

    def end(number: int, frame: object) -> None:
        for child in processes.children(os.getpid()) if ranks_too else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        shutil.rmtree(folder, ignore_errors=True)
        history.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
