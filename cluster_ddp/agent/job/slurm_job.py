"""A job of Slurm, on its batch host: starts the ranks, says how they ended, and has the job requeued if it may be."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_ddp import processes
from cluster_ddp.agent import array_values, channel_server, launch_env, launch_options, rank_notes
from cluster_ddp.agent.job import chain, job_log, slurm_commands, srun_step
from cluster_ddp.agent.job.restart import job_nodes, requeue
from cluster_ddp.agent.job.restart.failures import History
from cluster_ddp.agent.job.restart.job_nodes import Nodes
from cluster_ddp.agent.job.restart.requeue import Requeue
from cluster_ddp.agent.job.srun_step import On
from cluster_ddp.agent.job.start_loop import BaseJob, Starts
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.supervision.supervisor import Supervisor
from cluster_ddp.errors import SpecError
from cluster_ddp.run.names import RESTART, Env, File, Then
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.slurm.variables import Variables, node_name

HELD = signals.WARNINGS
"""What srun passes on to its tasks; HUP and QUIT make it kill them. TERM is final: it ends this process. A Ctrl-C in a
terminal reaches srun as well, which then asks for a second one."""

# How long to wait for the first words of tasks before a warning is passed on: those that have not begun miss it.
_FIRST_WORDS_S = 30.0


class SlurmJob(BaseJob):
    """A job of Slurm, from one requeue to the next.

    Args:
        options: of the job.
        env: the environment of the batch script, or of a shell of salloc, completed.
        is_on_node: whether this process is on the job's first node, as a batch script is.

    Raises:
        ClusterDDPError: the environment contradicts itself, or all ports for the rendezvous are in use.
    """

    def __init__(self, options: AgentOptions, env: Mapping[str, str], *, is_on_node: bool = True) -> None:
        self.chain_number = int(env["SLURM_ARRAY_TASK_ID"]) if options.chain else None
        """The number of the job in its chain; None without one."""
        if options.chain:
            env = chain.in_chain(Path(options.run_dir or ""), env)
        self.label = Variables(env).job_label()
        self.folder = launch_env.run_dir(options, self.label)
        command = array_values.filled(options.command, options.grid, env)
        self.options = replace(options, command=tuple(command))
        self.job = env["SLURM_JOB_ID"] if options.chain else self.label
        self._host = node_name(env)
        self._is_on_node = is_on_node
        self.requeues = Variables(env).requeues()
        self.size = launch_env.shape(options, env)
        self.added = launch_env.on_slurm(options, self.size, self.label)
        self.added |= launch_env.of_start({**env, **self.added}, self._host, self.requeues)
        self.env = {**env, **self.added}
        # Without --run-dir, a script may have set the variable itself: the ranks' records are there, but no logs.
        self.fenced_dir = self.folder or (Path(env[Env.RUN_DIR]) if env.get(Env.RUN_DIR) else None)
        self._script = os.getppid()

    def run(self) -> int:
        """Start the ranks, wait for their end, and do what follows from it. Returns the exit status.

        Raises:
            SpecError: srun is not there.
        """
        if shutil.which("srun", path=self.env.get("PATH")) is None:
            hint = "after module purge, load Slurm's module again; or extend the PATH"
            raise SpecError("Starting the ranks of the job:", "srun is not on the PATH.", hint)
        history = History(self.fenced_dir, self.label, is_first=not self.requeues, shared=self.options.share)
        if self.requeues:
            job_log.say(f"{RESTART}{self.requeues + history.restarts} of job {self.env['SLURM_JOB_ID']}.")
        early = list[int]()
        self.early = early
        for number in HELD:
            signal.signal(number, lambda number, frame: early.append(number))
        with contextlib.closing(history):
            with rank_notes.folder() as folder, self.times_noted(folder / "job-times"):
                _leave_nothing(folder, history, ranks_too=self.env.get("ENVIRONMENT") != "BATCH")
                self.env |= srun_step.staged(self.options, self.size, self.env)
                self._ask_slurm()
                starts = Starts(self, history)
                ended = starts.run()
            srun_step.clean_up(self.options, self.env, ended.status)
            starts_again = self._starts_again(ended, starts, history)
        if not starts_again:
            job_log.show_how_to_resume(ended.status, self.env)
        return ended.status

    def _ask_slurm(self) -> None:
        """Ask for Slurm's configuration, and for the job's nodes where restarts need them."""
        options, is_alone = self.options, not self.shares_nodes
        self._slurm = slurm_commands.configuration(self.env)
        self.slurmd_port = self._slurm.slurmd_port
        if options.restarts and is_alone:
            least, _ = launch_options.node_range(options.nodes) if options.nodes else (0, 0)
            self.nodes = job_nodes.of_job(self.env, options.spare_nodes, least)
        is_ours = self.folder is not None and os.access(self.folder / File.SPEC, os.R_OK) and is_alone
        self._began_s = slurm_commands.began_s(self.env) if is_ours else None  # another script may have done more

    def listen(self) -> tuple[socket.socket, str]:
        """Return a socket that listens for the tasks, and its host as they name it. See `BaseJob`.

        Nodes may not know a login node by its name; Slurm tells each task where srun was started.
        """
        return channel_server.listen(self._slurm.srun_ports), self._host if self._is_on_node else ""

    def begin_start(self, on: On, number: int) -> dict[str, str]:
        """Begin a start. Returns its variables: of a range of nodes, each may have another number of ranks."""
        of_start = launch_env.of_start(self.env, on.nodes[0] if on.nodes else self._host, number)
        return {**of_start, "WORLD_SIZE": str(on.of(self.size).world_size)}

    def noted(self, on: On, nodes: Nodes) -> dict[str, Any]:
        """Return what the job has, and how many nodes train: now, or since Slurm began."""
        found = {
            "requeue": self.requeues,
            "nodes": len(nodes.allocated) or self.size.nodes + self.options.spare_nodes,
            "training": on.of(self.size).nodes,
            "gpus": self.size.gpus_per_node,
            "since": self._began_s,
        }
        self._began_s = None
        return found

    def start_step(self, on: On, reports: TaskReports) -> Supervisor:
        """Start srun. See `BaseJob`."""
        supervisor = Supervisor(Notes(Path(os.devnull)), lambda end: None, held=HELD, takers=_srun_if_ready(reports))
        signal.signal(signal.SIGINT, lambda number, frame: None)
        options = replace(
            self.options,
            doctor=self.options.doctor and on.is_first,
            ignore_warnings=self._slurm.all_get_signals,
        )
        env = srun_step.step_env(options, self.size, self.env, on)
        supervisor.start(None, srun_step.srun(options, self.size, self.folder, on), env)
        return supervisor

    def times_noted(self, path: Path) -> AbstractContextManager[None]:
        """Note its start and its end in a file, for rank 0. See `slurm_commands.times_noted`."""
        return slurm_commands.times_noted(self.job, self.env, path)

    @property
    def is_over(self) -> bool:
        """Whether the batch script has ended, and so the job. Without proctrack/cgroup, this process outlives it."""
        return os.getppid() != self._script

    def why_superseded(self) -> str:
        """Why Slurm considers this start of the job over. See `BaseJob`."""
        if self.is_over:
            return requeue.SCRIPT_ENDED
        found = slurm_commands.why_not_this_start(self.env["SLURM_JOB_ID"], self.env)
        return requeue.ANOTHER_START.format(found.words) if found.is_ok and found.words else ""

    def command(self) -> list[str]:
        """Return the command that starts the tasks."""
        return srun_step.srun(self.options, self.size, self.folder)

    def _starts_again(self, ended: Outcome, starts: Starts, history: History) -> bool:
        """Have the job requeued, or its chain continued, if it may be. Returns whether that will be so.

        It is noted before: Slurm ends this process soon after it has accepted a requeue.
        """
        why = ""
        if unfinished := self.why_unfinished(ended):
            job_log.say(unfinished)
            return True
        if ended.status and self.is_over:  # it may be queued again already, by somebody else
            job_log.say(requeue.SCRIPT_ENDED)
        elif starts.follows.then == Then.REQUEUE:
            why = f"Failed with status {ended.status}"
        elif ended.state == "STOPPED" and starts.tasks_status == 0:
            job_log.say(requeue.NOT_FINISHED)
        elif ended.state == "STOPPED" and requeue.may_restart(self.requeues, self.options.max_requeues):
            why = "Stopped in time"
        must_ask = ended.status and not self.is_over and (self.chain_number is not None or not why)
        if must_ask and (superseded := self.why_superseded()):
            job_log.say(superseded)
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
        leave, needed, mem_mb = recovery.left_behind(starts.follows), recovery.needed, recovery.memory(starts.number)
        memory = [] if mem_mb is None else [f"MinMemoryNode={mem_mb}"]
        nodes = [] if recovery.nodes_given_back is None else [f"NumNodes={recovery.nodes_given_back}"]
        if self.chain_number is not None:
            return chain.end(
                self.env,
                self.chain_number,
                why,
                leave=leave,
                changes=memory,
                needed=needed,
                most=self.options.max_requeues,
            )
        if not why:
            return False
        return Requeue(self.label, self.env, leave=leave, changes=[*nodes, *memory], needed=needed).ask(
            why, starts.number + 1
        )


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


def _srun_if_ready(reports: TaskReports) -> Callable[[int, int], list[int]]:
    """Return who takes a warning: srun, when it waits for signals, and its tasks have begun."""
    at_the_latest = time.monotonic() + _FIRST_WORDS_S

    def takers(srun: int, number: int) -> list[int]:
        are_ready = reports.all_have_begun or time.monotonic() > at_the_latest
        waits = processes.blocks(srun, number) or processes.catches(srun, number)
        return [srun] if are_ready and waits else []

    return takers
