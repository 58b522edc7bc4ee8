"""The starts of a job's ranks in its allocation: each begins, ends, is judged, and it is decided what follows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_ddp.agent import launch_env, option_types
from cluster_ddp.agent.job import job_log, slurm_commands, srun_step
from cluster_ddp.agent.job.job_setup import JobSetup
from cluster_ddp.agent.job.restart import job_nodes
from cluster_ddp.agent.job.restart.failures import History, Verdict
from cluster_ddp.agent.job.restart.recovery import Recovery
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.job.tasks import Tasks
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.run import fence
from cluster_ddp.run.names import Env, File, Then
from cluster_ddp.run.outcome import Outcome


class Starts:
    """The starts of a job's ranks, as often as they may be."""

    def __init__(self, job: JobSetup, noted: Notes, history: History) -> None:
        slurm, stays = slurm_commands.configuration(job.env), job.options.restarts > 0
        least, _ = option_types.node_range(job.options.nodes) if job.options.nodes else (0, 0)
        has_nodes = stays and not job.shares_nodes
        nodes = job_nodes.of_job(job.env, job.options.spare_nodes, least) if has_nodes else job_nodes.UNKNOWN
        self._job, self._slurm, self._history = job, slurm, history
        is_ours = job.folder is not None and os.access(job.folder / File.SPEC, os.R_OK) and not job.shares_nodes
        self._began_s = slurm_commands.began_s(job.env) if is_ours else None  # another script may have done more
        self.number = job.requeues + history.restarts
        """Number of starts before this one."""
        self.recovery = Recovery(job.options, job.env, history, nodes, slurm.slurmd_port, self._examine)
        note_gone = self.recovery.note_gone
        self._tasks = Tasks(noted, job.env, slurm.srun_ports, stays=stays, note_gone=note_gone, look=job.look)
        self._on, self._is_in_step = srun_step.On(self.recovery.nodes.training), False  # where the next one begins
        self._left_logs: list[Path] = []  # of tasks that nobody can end

    def run(self) -> Outcome:
        """Start the ranks, again as often as they may be. Returns how the last start ended."""
        with contextlib.closing(self._tasks):
            # Nodes may not know a login node by its name; Slurm tells each task where srun was started.
            self._job.env[Env.CHANNEL] = f"{self._job.host if self._job.is_on_node else ''}:{self._tasks.port}"
            if spares := self.recovery.nodes.spares:
                env = srun_step.step_env(self._job.options, self._job.size, self._job.env, srun_step.On(spares))
                self._tasks.watch(srun_step.spares(self._job.options, self._job.size, spares), env, spares)
            while True:
                self._begin()
                self.status = self._tasks.wait()
                ended = self._judge()
                self.follows = self._decide(ended)
                if self.follows.then != Then.RESTART:
                    return ended
                self.number += 1

    def _begin(self) -> None:
        """Begin a start: in the step that runs, or in a new one."""
        job, on, launcher = self._job, self._on, self._job.options.launcher
        size = on.of(job.size)
        self._reports = TaskReports(launcher, size.world_size, job.folder, tasks=size.tasks(launcher))
        job.env.update(self._of_start(on, self.number), **{Env.START_ID: self._note_start(size.nodes)})
        if self._is_in_step:
            self._tasks.again(self._reports, job.env)
            return
        if job.records is not None:
            with contextlib.suppress(OSError):  # such as on a full disk
                fence.take_over(job.records, job.label, self.number, logs=self._left_logs)
        self._tasks.start(*self._step(on, job.env), self._reports, job.early)
        job.early.clear()

    def _note_start(self, training: int) -> str:
        """Note what the job has, and how many nodes train: now, or since Slurm began. Returns its id."""
        job = self._job
        nodes = len(self.recovery.nodes.allocated) or job.size.nodes + job.options.spare_nodes
        has = {"nodes": nodes, "training": training, "gpus": job.size.gpus_per_node, "since": self._began_s}
        self._began_s = None
        return self._history.begin(self.number, requeue=job.requeues, **has)

    def _of_start(self, on: srun_step.On, number: int) -> dict[str, str]:
        """Return the variables of a start: of a range of nodes, each may have another number of ranks."""
        job, size = self._job, on.of(self._job.size)
        of_start = launch_env.of_start(job.env, on.nodes[0] if on.nodes else job.host, number)
        return {**of_start, "WORLD_SIZE": str(size.world_size)}

    def _step(self, on: srun_step.On, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return srun's command, and its environment."""
        job, doctor = self._job, self._job.options.doctor and not on.is_beside
        ignored, stays = self._slurm.all_get_signals, self._tasks.stays
        options = job.options._replace(doctor=doctor, ignore_warnings=ignored, stays=stays)
        return srun_step.srun(options, job.size, job.folder, on), srun_step.step_env(options, job.size, env, on)

    def _examine(self, nodes: Sequence[str]) -> Mapping[str, str]:
        return self._tasks.examine(nodes)

    def _judge(self) -> Outcome:
        """Say how a start has ended."""
        now_s = round(time.time(), 3)
        ended = self._reports.judge(Outcome(self._job.label, self.number, "COMPLETED", self.status, time=now_s))
        ended = ended._replace(lost_nodes=self.recovery.lost(self._reports) or ended.lost_nodes)
        ended = self._job.judged(ended)
        job_log.show(ended, self._reports.log_of(ended.first), self._job.env)
        return ended

    def _is_over(self) -> bool:
        """Whether this start is over for Slurm, too. It may be away: what needs no new step does not ask it."""
        asks = self._tasks.stays and not self._tasks.can_start_again
        return bool(self._job.over()) if asks else self._job.is_over

    def _decide(self, ended: Outcome) -> Verdict:
        """Return what follows, and note it; end the step, unless the next start begins in it.

        What follows a start that was stopped in time is not known yet.
        """
        follows = Verdict(Then.END)
        if ended.state == "FAILED" and not self._is_over():
            follows = self.recovery.after(ended, self._reports)
        elif ended.state != "STOPPED" and not self._job.left(ended):
            self._history.end(ended)
        self._left_logs = self._reports.logs_of_gone()
        training = self.recovery.nodes.training
        self._is_in_step = follows.then == Then.RESTART and self._tasks.can_start_again and training == self._on.nodes
        if not self._is_in_step:
            self._tasks.end()
        self._on = srun_step.On(training, is_beside=not self._job.shares_nodes)
        return follows
