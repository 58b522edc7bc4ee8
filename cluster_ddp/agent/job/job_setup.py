"""What a job of Slurm starts with: its options, its size, its environment, its folders."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from cluster_ddp.agent import array_values, launch_env
from cluster_ddp.agent.job import chain, slurm_commands, srun_step
from cluster_ddp.agent.job.restart import requeue
from cluster_ddp.agent.launch_options import Options
from cluster_ddp.run.names import Env
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.slurm.variables import Variables, node_name


class JobSetup:
    """A job of Slurm as it starts.

    Args:
        options: of the job.
        env: the environment of the batch script, or of a shell of salloc, completed.
        is_on_node: whether this process is on the job's first node, as a batch script is.

    Raises:
        ClusterDDPError: the environment contradicts itself, or all ports for the rendezvous are in use.
    """

    shares_nodes: ClassVar[bool] = False
    """Whether others of our jobs are on its nodes: it has a part of a job of Slurm's."""

    def __init__(self, options: Options, env: Mapping[str, str], *, is_on_node: bool = True) -> None:
        self.link = int(env["SLURM_ARRAY_TASK_ID"]) if options.chain else None
        """The number of the job in its chain; None without one."""
        if options.chain:
            env = chain.in_chain(Path(options.run_dir or ""), env)
        self.label = Variables(env).job_label()
        self.folder = launch_env.run_dir(options, self.label)
        command = array_values.filled(options.command, options.grid, env)
        self.options = options._replace(command=tuple(command))
        self.job = env["SLURM_JOB_ID"] if options.chain else self.label
        """The job's id, of a chain this job's."""
        self.host, self.is_on_node = node_name(env), is_on_node
        self.requeues = Variables(env).requeues()
        self.size = launch_env.shape(options, env)
        self.added = launch_env.on_slurm(options, self.size, self.label)
        self.added |= launch_env.of_start({**env, **self.added}, self.host, self.requeues)
        """Variables that the tasks get beside those of the batch script."""
        self.env = {**env, **self.added}
        # Without --run-dir, a script may have set the variable itself: the ranks' records are there, but no logs.
        self.records = self.folder or (Path(env[Env.RUN_DIR]) if env.get(Env.RUN_DIR) else None)
        self.early: list[int] = []
        """Signals that came before the ranks were started."""
        self._script = os.getppid()

    @property
    def is_over(self) -> bool:
        """Whether what started this process has ended, and so the job: only proctrack/cgroup ends this one with it."""
        return os.getppid() != self._script

    def look(self, step: str, send: Callable[[signal.Signals], object], srun: int) -> float:
        """Look at the running step, and do what is due. Returns after how many seconds to look again.

        Args:
            step: its id; empty while its tasks have not begun.
            send: sends a signal to all its tasks.
            srun: the process that started it.
        """
        return float("inf")

    def judged(self, ended: Outcome) -> Outcome:
        """Return how a start ended: if it was ended by `look`, that counts."""
        return ended

    def left(self, ended: Outcome) -> str:
        """Return why the job has not ended for good, although this process ends; empty if it has."""
        return ""

    def over(self) -> str:
        """Why this start of the job is over for Slurm, which is asked; empty if it is not, or Slurm does not answer."""
        if self.is_over:
            return requeue.SCRIPT_ENDED
        found = slurm_commands.instead_of(self.env["SLURM_JOB_ID"], self.env)
        return requeue.ANOTHER_START.format(found.words) if found.is_ok and found.words else ""

    def command(self) -> list[str]:
        """Return the command that starts the tasks."""
        return srun_step.srun(self.options, self.size, self.folder)
