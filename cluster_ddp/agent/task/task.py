"""`task`: what each task of a step runs. It prepares the place of its ranks, starts them, and keeps them.

With srun it has one rank; with fork, all of its node's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import launch_env, rank_notes
from cluster_ddp.agent.channel import Client
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.rank_end import End
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.supervision.supervisor import Supervisor, say, wake
from cluster_ddp.agent.task import python_module, rank_command
from cluster_ddp.agent.task.no_process_group import GroupCheck
from cluster_ddp.agent.task.orders import Orders
from cluster_ddp.agent.task.seed_process import Seed
from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, JobError, one_line
from cluster_ddp.run import outcome
from cluster_ddp.run.names import Env, File
from cluster_ddp.slurm.variables import node_name

PATIENCE_S = 60.0
"""Seconds until a killed process has to be gone. The kernel may have to wait for a driver or a file system."""


def run(options: AgentOptions) -> int:
    """Keep the ranks of a task. Returns their exit status."""
    env = dict(os.environ)
    if Env.LOCAL_JOB_ID in env:
        # Slurm ends what a killed job leaves behind; here nobody would.
        processes.end_with_parent(signal.SIGTERM, os.getppid())
    else:
        env |= launch_env.of_task(options, env)
    if options.venv is None:
        return Task(options, env).run()
    from cluster_ddp.agent.task import staged_env  # few tasks need it

    tasks = int(env["LOCAL_WORLD_SIZE"]) if options.launcher == "srun" else 1
    staged = staged_env.use(options.venv, options.command, env, tasks=tasks)
    try:
        return Task(replace(options, command=tuple(staged.command)), staged.env).run()
    finally:
        staged_env.remove(staged)


class Task:
    """A task's ranks."""

    def __init__(self, options: AgentOptions, env: Mapping[str, str]) -> None:
        self._options, self._env = options, env
        if options.launcher == "srun":
            self._ranks = [int(env["RANK"])]
        else:
            from cluster_ddp.agent.task import node_ranks  # few tasks need it

            self._ranks = node_ranks.of_task(env)
        self._client = Client.of_job(env)
        self._orders: Orders | None = None
        self._checks: dict[int, GroupCheck] = {}
        self._may_be_left = Env.LOCAL_JOB_ID not in env  # ranks of an earlier start, which Slurm could not end
        self._is_restart = False
        self._got_term = False  # Slurm ends the step here: KILL follows
        self._seed = Seed(options, gives_up=lambda: self._ends_by() != 0)

    def run(self) -> int:
        """Keep the ranks, again as often as the job says, and report each end. Returns their last exit status."""
        with contextlib.closing(self._client):
            if self._options.restarts and self._client.is_connected:
                return self._run_for_the_job()
            status = self._start()
            self._seed.end()
            return status

    def _run_for_the_job(self) -> int:
        """Start the ranks whenever the job says so, until it is over."""
        processes.adopt_orphans()
        self._orders = Orders(self._client, int(self._env[Env.START]), wake)
        while True:
            status = self._start()
            self._may_be_left = not processes.kill_all_below(but=[self._seed.pid])
            got_term = self._got_term or signal.SIGTERM in signal.sigpending()
            self._client.say("idle", task=launch_env.task(self._env), status=status, got_term=got_term)
            if not self._is_to_start_again():
                self._seed.end()
                return status

    def _ends_by(self) -> int:
        """Return the signal that ends a start before its ranks are there: one that waits, or the job's; 0 for none."""
        waiting = signal.sigpending()
        if signal.SIGTERM in waiting:
            return signal.SIGTERM
        if signal.SIGINT in waiting:
            return signal.SIGINT
        return signal.SIGKILL if self._orders is not None and self._orders.must_end else 0

    def _is_to_start_again(self) -> bool:
        """Wait for the next start, and take its variables. False if the job is over."""
        assert self._orders is not None
        while (order := self._orders.wait())["kind"] == "stop":
            pass  # it has ended already
        if order["kind"] != "again":
            return False
        self._env = {**self._env, **order["env"]}
        self._client.always["start"] = int(self._env[Env.START])
        self._options = replace(self._options, doctor=False)  # the nodes are the same
        self._is_restart = True
        return True

    def _place(self) -> dict[str, object]:
        """What the job must know of this task."""
        task, step_id = launch_env.task(self._env), self._env.get("SLURM_STEP_ID", "")
        place = {"ranks": self._ranks, "host": node_name(os.environ), "task": task, "step_id": step_id}
        return {**place, "stays": self._options.restarts > 0}

    def _start(self) -> int:
        """Start the ranks, and wait for their ends. Returns their exit status."""
        with rank_notes.folder() as folder:
            own = {Env.NOTES: str(folder), Env.AGENT: processes.identity(os.getpid())}
            return self._kept({**self._env, **own}, Notes(folder))

    def _kept(self, env: Mapping[str, str], notes: Notes) -> int:
        self._client.say("hello", **self._place())
        try:
            if self._orders is not None and self._may_be_left:
                kill_earlier_ranks(env, but=self._seed.pid)
            if self._options.doctor and (status := self._examined(env, notes)):
                return status
            supervisor = Supervisor(notes, self._tell)
            pids = self._begun(supervisor, env)
        except (OSError, ClusterDDPError) as error:
            status, why = _not_started(self._options.command, error)
            self._tell(End(self._ranks[0], node_name(os.environ), status, why))
            processes.kill_all_below(but=[self._seed.pid])  # others may have started
            return status
        if missing := [rank for rank in self._ranks if rank not in pids]:
            status = 128 + self._ends_by()
            signals.taken([signal.SIGINT])  # it ends no other start
            supervisor.kill()
            self._tell(End(missing[0], node_name(os.environ), status))
            return status
        world_size = int(env.get("WORLD_SIZE", "1"))
        self._checks = {rank: GroupCheck(pid, rank, world_size, notes, self._client) for rank, pid in pids.items()}
        orders = self._orders
        status = supervisor.wait(lambda: self._look(supervisor), until=lambda: orders is not None and orders.must_end)
        if supervisor.is_running:  # the job ends this start
            supervisor.kill()
            status = outcome.KILL
        self._got_term |= supervisor.has_got_term
        return status

    def _tell(self, end: End) -> None:
        if end.status == 0 and end.rank in self._checks:
            self._checks[end.rank].ended()
        self._client.say("ended", **end._asdict())

    def _begun(self, supervisor: Supervisor, env: Mapping[str, str]) -> dict[int, int]:
        """Start the ranks: forked, or else anew. Returns rank -> process id; not of all, if the start ends before."""
        options, pids = self._options, dict[int, int]()
        command = rank_command.of_start(options, env)
        ignored = options.ignore_warnings and not signals.is_shell(options.command)
        self._seed.look()
        self._seed.start(command, env)
        for rank in self._ranks:
            if pids and self._ends_by():
                break
            own, log, cpus = self._own(rank, env)
            pid = self._seed.fork(command, own, log=log, cpus=cpus, ignore_warnings=ignored)
            if pid is not None:
                supervisor.adopt(rank, pid)
            elif self._ends_by():
                break
            else:
                processes.kill_all_below(but=[*pids.values(), self._seed.pid])  # one whose seed did not answer
                words = rank_command.in_container(options, command, own, ignored)
                with _bound_to(cpus):
                    pid = supervisor.start(rank, *words, log=log, ignore_warnings=ignored)
            pids[rank] = pid
        if self._ranks[0] == 0 and (options.launcher == "fork" or self._is_restart):
            self._seed.say()
        return pids

    def _own(self, rank: int, env: Mapping[str, str]) -> tuple[Mapping[str, str], Path | None, set[int]]:
        """Return the environment of a rank, its log if it is not the task's, and its CPUs."""
        cpus = os.sched_getaffinity(0)
        if self._options.launcher == "srun":
            return env, None, cpus
        from cluster_ddp.agent.task import node_ranks

        local_rank, ranks = self._ranks.index(rank), len(self._ranks)
        own = node_ranks.environment(env, local_rank)
        log = Path(env[Env.RUN_DIR]) / File.TASK_LOG.format(rank) if env.get(Env.RUN_DIR) else None
        return own, log, node_ranks.share_of_cpus(cpus, local_rank, ranks, env)

    def _look(self, supervisor: Supervisor) -> float:
        if self._seed.look():
            supervisor.count_oom_kills()
        return min(check.look() for check in self._checks.values())

    def _examined(self, env: Mapping[str, str], notes: Notes) -> int:
        """Run the doctor before the ranks: it takes seconds. Returns its exit status."""
        env, rank = dict(env), self._ranks[0]
        if self._options.launcher == "fork":  # one examines the node, which stands for a rank
            env[Env.GPUS_PER_TASK] = str(int(env["LOCAL_WORLD_SIZE"]) * self._options.gpus_per_task)
            env = {name: value for name, value in env.items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            if Env.LOCAL_JOB_ID in env:
                env |= launch_env.ALONE
            rank = int(env.get("RANK") or env["SLURM_PROCID"])
        held = [signal.SIGTERM]  # any other waits for the ranks
        supervisor = Supervisor(notes, lambda end: self._tell(end) if end.status else None, held=held)
        supervisor.start(rank, python_module.doctor(self._options.command), env)
        status = supervisor.wait()
        self._got_term |= supervisor.has_got_term
        return status


@contextlib.contextmanager
def _bound_to(cpus: set[int]) -> Iterator[None]:
    """Bind this thread to CPUs: what it starts is bound to them from its first moment on, when it counts them."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # they were taken away
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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


def kill_earlier_ranks(env: Mapping[str, str], *, but: int | None = None) -> None:
    """Kill the ranks of earlier starts of the job in this place, whose GPUs a new start needs. Wait for their ends.

    But one process: the seed of the new start.

    Raises:
        JobError: one does not end.
    """
    names = ("LOCAL_RANK",) if Env.LOCAL_JOB_ID in env else ("SLURMD_NODENAME", "SLURM_LOCALID")
    of_place = {name: env[name] for name in (Env.SECRET, *names) if name in env}  # one task for all ranks has no rank
    deadline = time.monotonic() + PATIENCE_S
    while left := [
        pid
        for pid, found in processes.environments(of_place).items()
        if Env.NOTES in found and found.get(Env.START) != env[Env.START] and pid != but  # agents have no notes
    ]:
        if time.monotonic() > deadline:
            what = f"process {left[0]} of an earlier start does not end within {PATIENCE_S:g} s of KILL."
            raise JobError(f"Starting a rank on {node_name(os.environ)}:", what, "the node is at fault: leave it out")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
