"""`task`: what each task of a step runs. It prepares the rank's place, starts the command, and keeps it.

The command is the user's; with fork, the parent of a node's ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import launch_env, rank_notes
from cluster_ddp.agent.channel import Client
from cluster_ddp.agent.launch_options import Options
from cluster_ddp.agent.rank_end import End
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.task import python_module, rank_command, signals
from cluster_ddp.agent.task.no_process_group import GroupCheck
from cluster_ddp.agent.task.orders import Orders
from cluster_ddp.agent.task.supervisor import Supervisor, say, wake
from cluster_ddp.agent.task.warm_process import Warm
from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, JobError, one_line
from cluster_ddp.run import outcome
from cluster_ddp.run.files import open_own
from cluster_ddp.run.names import Env, File
from cluster_ddp.slurm.variables import node_name

PATIENCE_S = 60.0
"""Seconds until a killed process has to be gone. The kernel may have to wait for a driver or a file system."""


def run(options: Options) -> int:
    """Keep the command of a task of Slurm. Returns its exit status."""
    env = dict(os.environ)
    if Env.LOCAL_JOB_ID in env:
        # Slurm ends what a killed job leaves behind; here nobody would.
        processes.end_with_parent(signal.SIGTERM, os.getppid())
    else:
        env |= launch_env.of_task(options, env)
    rank = int(env["RANK"]) if options.launcher == "srun" else None
    if options.venv is None:
        return Task(options, rank, env).keep()
    from cluster_ddp.agent.task import staged_env  # few tasks need it

    tasks = int(env["LOCAL_WORLD_SIZE"]) if options.launcher == "srun" else 1
    staged = staged_env.use(options.venv, options.command, env, tasks=tasks)
    try:
        return Task(options._replace(command=tuple(staged.command)), rank, staged.env).keep()
    finally:
        staged_env.remove(staged)


class Task:
    """A task's command. Its rank is None for the parent of several."""

    def __init__(self, options: Options, rank: int | None, env: Mapping[str, str]) -> None:
        self._options, self._rank, self._env = options, rank, env
        self._client = Client.of_job(env)
        self._orders: Orders | None = None
        self._check: GroupCheck | None = None
        self._may_be_left = True  # ranks of an earlier start, here
        self._got_term = False  # Slurm ends the step here: KILL follows
        self._warm = Warm(options if options.stays else options._replace(cold=True))

    def keep(self) -> int:
        """Keep the command, again as often as the job says, and report each end. Returns its last exit status."""
        with contextlib.closing(self._client):
            if self._options.stays and self._client.is_connected:
                return self._keep_for_the_job()
            if self._options.waits:
                say("The job's agent can't be reached: this task does not wait for the next start.")
                return USAGE_EXIT_STATUS
            return self._start()

    def _keep_for_the_job(self) -> int:
        """Start the command whenever the job says so, until it is over."""
        status, waits = 0, self._options.waits
        processes.adopt_orphans()
        self._orders = Orders(self._client, waits or int(self._env[Env.START]), wake)
        if waits:
            command, env = rank_command.launched(self._options, self._env)
            self._warm.begin(command, {**env, Env.NOTES: os.devnull}, at_once=True)  # so that it is known as a rank
            self._warm.look()
            self._client.always["standby"] = waits
            self._client.say("waiting", **self._place())
        is_to_start = not waits or self._is_to_start_again()
        while is_to_start:
            status = self._start()
            self._may_be_left = not processes.kill_all_below(but=self._warm.pid)
            got_term = self._got_term or signal.SIGTERM in signal.sigpending()
            self._client.say("idle", task=self._env["SLURM_PROCID"], status=status, got_term=got_term)
            is_to_start = self._is_to_start_again()
        self._warm.end()
        return status

    def _is_to_start_again(self) -> bool:
        """Wait for the next start, and take its variables. False if the job is over."""
        assert self._orders is not None
        while (order := self._orders.wait())["kind"] == "stop":
            pass  # it has ended already
        if order["kind"] != "again":
            return False
        self._env = {**self._env, **order["env"]}
        self._client.always["start"] = int(self._env[Env.START])
        self._options = self._options._replace(doctor=False)  # the nodes are the same
        if log_dir := order.get("log_dir"):
            log = Path(log_dir) / File.TASK_LOG.format(self._env["SLURM_PROCID"])
            with contextlib.suppress(OSError):  # a full disk: the output goes to the job's log
                processes.write_output_to(open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
        return True

    def _place(self) -> dict[str, object]:
        """What the job must know of this task."""
        ranks, task = [] if self._rank is None else [self._rank], self._env.get("SLURM_PROCID")
        step_id = self._env.get("SLURM_STEP_ID", "")
        place = {"ranks": ranks, "host": node_name(os.environ), "task": task, "step_id": step_id}
        return {**place, "stays": self._options.stays}

    def _start(self) -> int:
        """Start the command, and wait for its end. Returns its exit status."""
        with rank_notes.folder() as folder:
            own = {Env.NOTES: str(folder), Env.AGENT: processes.identity(os.getpid())}
            return self._kept({**self._env, **own}, Notes(folder))

    def _kept(self, env: Mapping[str, str], notes: Notes) -> int:
        self._client.say("hello", **self._place())
        try:
            if self._orders is not None and self._may_be_left:
                kill_earlier_ranks(env)
            if self._options.doctor and (status := self._examined(env, notes)):
                return status
            supervisor = Supervisor(notes, self._tell)
            pid = self._begun(supervisor, env)
        except (OSError, ClusterDDPError) as error:
            status, why = _not_started(self._options.command, error)
            self._tell(End(self._rank, node_name(os.environ), status, why))
            return status
        check = self._check = GroupCheck(pid, self._rank, int(env.get("WORLD_SIZE", "1")), notes, self._client)
        orders = self._orders
        status = supervisor.keep(
            lambda: self._look(supervisor, check), until=lambda: orders is not None and orders.must_end
        )
        if supervisor.is_running:  # the job ends this start
            supervisor.kill()
            status = outcome.KILL
        self._got_term |= supervisor.has_got_term
        return status

    def _tell(self, end: End) -> None:
        if end.status == 0 and self._check is not None:
            self._check.ended()
        self._client.say("ended", **end._asdict())

    def _begun(self, supervisor: Supervisor, env: Mapping[str, str]) -> int:
        """Start the rank, in the process that waits for that if there is one. Returns its process id."""
        options = self._options
        ignored = options.ignore_warnings and not signals.is_shell(options.command)
        rank = rank_command.in_container(options, *rank_command.launched(options, env), ignored)
        pid = self._warm.become(*rank, ignore_warnings=ignored)
        if pid is None:
            pid = supervisor.start(self._rank, *rank, ignore_warnings=ignored)
        else:
            supervisor.adopt(self._rank, pid)
        if self._orders is not None:
            self._warm.begin(rank[0], {**rank[1], Env.START: str(int(env[Env.START]) + 1)})
        return pid

    def _look(self, supervisor: Supervisor, check: GroupCheck) -> float:
        if self._warm.was_killed():
            supervisor.count_oom_kills()
        return min(check.look(), self._warm.look())

    def _examined(self, env: Mapping[str, str], notes: Notes) -> int:
        """Run the doctor before the ranks: it takes seconds. Returns its exit status."""
        env, rank = dict(env), self._rank
        if rank is None:  # one examines the node, which stands for a rank
            env[Env.GPUS_PER_TASK] = str(int(env["LOCAL_WORLD_SIZE"]) * self._options.gpus_per_task)
            env = {name: value for name, value in env.items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            if Env.LOCAL_JOB_ID in env:
                env |= launch_env.ALONE
            rank = int(env.get("RANK") or env["SLURM_PROCID"])
        held = [signal.SIGTERM]  # any other waits for the ranks
        supervisor = Supervisor(notes, lambda end: self._tell(end) if end.status else None, held=held)
        supervisor.start(rank, python_module.doctor(self._options.command), env)
        status = supervisor.keep()
        self._got_term |= supervisor.has_got_term
        return status


def _not_started(command: Sequence[str], error: OSError | ClusterDDPError) -> tuple[int, str]:
    """Say why a command can't be started. Returns its exit status, as a shell's, and why in one line."""
    status = USAGE_EXIT_STATUS
    if isinstance(error, OSError):
        is_there = error.errno in (errno.EACCES, errno.ENOEXEC)
        hint = "look at the PATH of the job: its modules, environment and --setup"
        if is_there:
            hint = f"chmod +x {shlex.quote(command[0])}; a script's first line is such as #!/bin/bash"
        error = JobError(f"Starting {shlex.join(command)}:", f"{error.strerror}: {error.filename}.", hint)
        status = 126 if is_there else 127
    say(f"error: {error}")
    return status, one_line(f"{error.asked} {error.found}")


def kill_earlier_ranks(env: Mapping[str, str]) -> None:
    """Kill the ranks of earlier starts of the job in this place, whose GPUs a new start needs. Wait for their ends.

    Raises:
        JobError: one does not end.
    """
    of_place = {name: env[name] for name in (Env.SECRET, "SLURMD_NODENAME", "SLURM_LOCALID")}
    deadline = time.monotonic() + PATIENCE_S
    while left := [
        pid
        for pid, found in processes.environments(of_place).items()
        if Env.NOTES in found and found.get(Env.START) != env[Env.START]  # agents have no notes
    ]:
        if time.monotonic() > deadline:
            what = f"process {left[0]} of an earlier start does not end within {PATIENCE_S:g} s of KILL."
            raise JobError(f"Starting a rank on {node_name(os.environ)}:", what, "the node is at fault: leave it out")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
