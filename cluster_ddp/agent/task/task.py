"""`task`: what each task of a step runs. It prepares the rank's place, starts the command, and keeps it.

The command is the user's; with torchrun and fork, the parent of a node's ranks. Under torchrun, each rank has an agent
of its own (`rank`), since torchrun does not say how its workers end.
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
from cluster_ddp.agent import launch_env, outcome, python_command
from cluster_ddp.agent.channel.client import Client
from cluster_ddp.agent.launch_options import Options
from cluster_ddp.agent.outcome import End
from cluster_ddp.agent.rank_notes import Notes, folder, one_line
from cluster_ddp.agent.task import process_group_check, rank_command, signals
from cluster_ddp.agent.task.orders import Orders
from cluster_ddp.agent.task.supervisor import Supervisor, say, wake
from cluster_ddp.agent.task.warm_process import Warm
from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, JobError
from cluster_ddp.files import open_own
from cluster_ddp.protocol import Env, File
from cluster_ddp.slurm.variables import node_name


def run(options: Options, *, ignore_warnings: bool, stays: bool = False, waits: str = "") -> int:
    """Keep the command of a task of Slurm. Returns its exit status.

    Args:
        options: of the job.
        ignore_warnings: whether a command may be sent a warning before it has a handler.
        stays: whether the job may have the command started again.
        waits: the name of a step whose commands start only when the job says so; empty for others.
    """
    env = dict(os.environ)
    if Env.LOCAL_JOB_ID in env:
        # Slurm ends what a killed job leaves behind; here nobody would.
        processes.end_with_parent(signal.SIGTERM, os.getppid())
    else:
        env |= launch_env.of_task(options, env)
    rank = int(env["RANK"]) if options.launcher == "srun" else None
    around = Task(options, rank, ignore_warnings, stays=stays, waits=waits)
    if options.venv is None:
        return around.keep(env)
    from cluster_ddp.agent.task import staging  # few tasks need it

    staged = staging.use(options.venv, options.command, env)
    try:
        around.options = options._replace(command=tuple(staged.command))
        return around.keep(staged.env)
    finally:
        staging.remove(staged)


class Task:
    """A task's command.

    Args:
        options: of the job.
        rank: its rank; None for the parent of several.
        ignore_warnings, stays, waits: see `run`.
    """

    def __init__(
        self, options: Options, rank: int | None, ignore_warnings: bool, *, stays: bool = False, waits: str = ""
    ) -> None:
        self.options, self._rank, self._ignore_warnings = options, rank, ignore_warnings
        self._stays, self._waits = stays, waits
        self._orders: Orders | None = None
        self._may_be_left = True  # ranks of an earlier start, here
        self._warm = Warm(options if stays else options._replace(cold=True))

    def keep(self, env: Mapping[str, str]) -> int:
        """Keep the command, again as often as the job says, and report each end. Returns its last exit status.

        Args:
            env: its environment.
        """
        client = Client.of_job(env)
        with contextlib.closing(client):
            if self._waits and not client.is_connected:
                say("The job's agent can't be reached: this task does not wait for the next start.")
                return USAGE_EXIT_STATUS
            if not self._stays or not client.is_connected:
                return self._start(env, client)
            processes.adopt_orphans()
            self._orders = Orders(client, self._waits or int(env[Env.START]), wake)
            status, again = 0, self._ready(env, client) if self._waits else env
            while again is not None:
                status = self._start(again, client)
                self._may_be_left = not processes.kill_all_below(but=self._warm.pid)
                client.say("idle", task=env["SLURM_PROCID"], status=status)
                again = self._next(again, client)
            self._warm.end()
            return status

    def _ready(self, env: Mapping[str, str], client: Client) -> Mapping[str, str] | None:
        """Get ready for a start that may come. Returns what `_next` does."""
        self._warm.begin_at_once(*rank_command.launched(self.options, env))
        client.always["standby"] = self._waits
        client.say("waiting", **self._place(env))
        return self._next(env, client)

    def _next(self, env: Mapping[str, str], client: Client) -> Mapping[str, str] | None:
        """Wait for the next start. Returns its environment; None if the job is over."""
        assert self._orders is not None
        while (order := self._orders.wait())["kind"] == "stop":
            pass  # it has ended already
        if order["kind"] != "again":
            return None
        env = {**env, **order["env"]}
        client.always["start"] = int(env[Env.START])
        self.options = self.options._replace(doctor=False)  # the nodes are the same
        if log_dir := order.get("log_dir"):
            _write_to(Path(log_dir) / File.TASK_LOG.format(env["SLURM_PROCID"]))
        return env

    def _place(self, env: Mapping[str, str]) -> dict[str, object]:
        """What the job must know of this task."""
        ranks = [] if self._rank is None else [self._rank]
        return {"ranks": ranks, "host": node_name(os.environ), "task": env.get("SLURM_PROCID"), "stays": self._stays}

    def _start(self, env: Mapping[str, str], client: Client) -> int:
        with folder() as place_of_notes:
            return self._kept({**env, Env.NOTES: str(place_of_notes)}, client, Notes(place_of_notes))

    def _kept(self, env: Mapping[str, str], client: Client, notes: Notes) -> int:
        options, rank = self.options, self._rank
        client.say("hello", **self._place(env))
        try:
            if self._orders is not None and self._may_be_left:
                kill_earlier_ranks(env)
            if options.doctor and (status := _examined(options, env, rank, notes, client)):
                return status
            supervisor = Supervisor(notes, lambda end: client.say("ended", **end._asdict()))
            ignored = options.launcher == "torchrun" or (
                self._ignore_warnings and not signals.is_shell(options.command)
            )
            words = rank_command.launched(options, env, ignore_warnings=self._ignore_warnings)
            pid = self._begun(supervisor, rank_command.started(options, *words, ignored), ignored)
        except (OSError, ClusterDDPError) as error:
            status, why = _not_started(options.command, error)
            client.say("ended", **End(rank, node_name(os.environ), status, why)._asdict())
            return status
        watch = process_group_check.Watch(pid, rank, int(env.get("WORLD_SIZE", "1")), notes, client)
        status = supervisor.keep(lambda: self._look(supervisor, watch), until=self._is_told)
        if supervisor.is_running:  # the job ends this start
            supervisor.kill()
            status = outcome.KILL
        return status

    def _begun(self, supervisor: Supervisor, rank: rank_command.Prepared, ignored: bool) -> int:
        """Start the rank, in the process that waits for that if there is one. Returns its process id."""
        pid = self._warm.become(*rank, ignore_warnings=ignored)
        if pid is None:
            pid = supervisor.start(self._rank, *rank, ignore_warnings=ignored)
        else:
            supervisor.adopt(self._rank, pid)
        if self._orders is not None:
            self._warm.begin(*rank)
        return pid

    def _look(self, supervisor: Supervisor, watch: process_group_check.Watch) -> float:
        if self._warm.was_killed():
            supervisor.count_oom_kills()
        return min(watch.look(), self._warm.look())

    def _is_told(self) -> bool:
        return self._orders is not None and self._orders.must_end


def _examined(options: Options, env: Mapping[str, str], rank: int | None, notes: Notes, client: Client) -> int:
    """Run the doctor before the ranks: it takes seconds. Returns its exit status."""
    env = dict(env)
    if rank is None:  # one examines the node, which stands for a rank
        env[Env.GPUS_PER_TASK] = str(int(env["LOCAL_WORLD_SIZE"]) * options.gpus_per_task)
        env = {name: value for name, value in env.items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        if Env.LOCAL_JOB_ID in env:
            env |= launch_env.ALONE
        rank = int(env.get("RANK") or env["SLURM_PROCID"])
    held = [signal.SIGTERM]  # any other waits for the ranks
    supervisor = Supervisor(notes, lambda end: client.say("ended", **end._asdict()) if end.status else None, held=held)
    supervisor.start(rank, python_command.doctor(options.command), env)
    return supervisor.keep()


def _write_to(log: Path) -> None:
    """Let this process's output, and that of all that it starts, go to a file from now on."""
    with contextlib.suppress(OSError):  # a full disk: it goes to the job's log
        processes.write_output_to(open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT))


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


PATIENCE_S = 60.0
"""Seconds until a killed process has to be gone. The kernel may have to wait for a driver or a file system."""


def kill_earlier_ranks(env: Mapping[str, str]) -> None:
    """Kill the task's predecessors: the commands of this place in earlier starts of the job. Wait for their ends.

    Args:
        env: of the task.

    Raises:
        JobError: one does not end.
    """
    of_place = {name: env[name] for name in (Env.SECRET, "SLURMD_NODENAME", "SLURM_LOCALID")}
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for pid, of_it in processes.environments(of_place).items() if _is_earlier(of_it, env)]:
        if time.monotonic() > deadline:
            found = f"process {left[0]} of an earlier start does not end within {PATIENCE_S:g} s of KILL."
            raise JobError(f"Starting a rank on {node_name(os.environ)}:", found, "the node is at fault: leave it out")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _is_earlier(found: Mapping[str, str], env: Mapping[str, str]) -> bool:
    return Env.NOTES in found and found.get(Env.START) != env[Env.START]  # agents have no notes
