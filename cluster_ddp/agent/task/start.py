"""`task`: what each task of a step runs. It prepares the rank's place, starts the command, and keeps it.

The command is the user's; with torchrun and fork, the parent of a node's ranks. Under torchrun, each rank has an agent
of its own (`rank`), since torchrun does not say how its workers end.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp import processes
from cluster_ddp.agent import place, python_command
from cluster_ddp.agent.channel import Client
from cluster_ddp.agent.notes import Notes, folder, one_line
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.outcome import End
from cluster_ddp.agent.task import alone, containers, signals
from cluster_ddp.agent.task.containers import Container
from cluster_ddp.agent.task.keeper import Keeper, say
from cluster_ddp.contract import Env
from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, JobError
from cluster_ddp.slurm.variables import node_name


class Prepared(NamedTuple):
    """What a task starts."""

    command: list[str]
    env: dict[str, str]


def agent() -> list[str]:
    """Return the command of this program, for its tasks: the frozen one, or the installed package's."""
    archive = getattr(__spec__.loader, "archive", None)  # of zipimport
    if archive is not None:
        return [sys.executable, "-I", "-S", str(Path(archive).absolute())]
    # Its folder: with -m, modules in the working folder would come before Python's own.
    return [sys.executable, str(Path(__file__).absolute().parents[1])]


def run(options: Options, *, ignore_warnings: bool) -> int:
    """Keep the command of a task of Slurm. Returns its exit status.

    Args:
        options: of the job.
        ignore_warnings: whether a command may be sent a warning before it has a handler.
    """
    env = dict(os.environ)
    if Env.LOCAL_JOB_ID in env:
        # Slurm ends what a killed job leaves behind; here nobody would.
        processes.end_with_parent(signal.SIGTERM, os.getppid())
    else:
        env |= place.of_task(options, env)
    rank = int(env["RANK"]) if options.launcher == "srun" else None
    if options.venv is None:
        return keep(options, env, rank=rank, ignore_warnings=ignore_warnings)
    from cluster_ddp.agent.task import staging  # few tasks need it

    staged = staging.use(options.venv, options.command, env)
    try:
        options = options._replace(command=tuple(staged.command))
        return keep(options, staged.env, rank=rank, ignore_warnings=ignore_warnings)
    finally:
        staging.remove(staged)


def keep(options: Options, env: Mapping[str, str], *, rank: int | None, ignore_warnings: bool) -> int:
    """Keep a task's command, and report its end to the job. Returns its exit status.

    Args:
        options: of the job.
        env: the environment of the command.
        rank: its rank; None for the parent of several.
        ignore_warnings: see `run`.
    """
    with folder() as place_of_notes:
        return _kept(options, {**env, Env.NOTES: str(place_of_notes)}, rank, ignore_warnings)


def _kept(options: Options, env: Mapping[str, str], rank: int | None, ignore_warnings: bool) -> int:
    notes = Notes(Path(env[Env.NOTES]))
    client = Client.of_job(env)
    client.say("hello", ranks=[] if rank is None else [rank], host=node_name(os.environ), task=env.get("SLURM_PROCID"))
    try:
        if options.doctor and (status := _examined(options, env, rank, notes, client)):
            return status
        keeper = Keeper(notes, lambda end: client.say("ended", **end._asdict()))
        ignored = options.launcher == "torchrun" or (ignore_warnings and not signals.is_shell(options.command))
        started = in_container(options, *launched(options, env, ignore_warnings=ignore_warnings), ignored)
        pid = keeper.start(rank, started.command, started.env, ignore_warnings=ignored)
    except (OSError, ClusterDDPError) as error:
        status, words = _not_started(options.command, error)
        client.say("ended", **End(rank, node_name(os.environ), status, words)._asdict())
        return status
    else:
        return keeper.keep(alone.Watch(pid, rank, int(env.get("WORLD_SIZE", "1")), notes, client).look)
    finally:
        client.close()


def launched(
    options: Options, env: Mapping[str, str], *, ignore_warnings: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the ranks of a node, and its environment: the user's own with srun."""
    command, env = list(options.command), dict(env)
    ranks = env["LOCAL_WORLD_SIZE"]
    if options.launcher == "fork":
        at = python_command.interpreter_words(command)
        run_dir = env.get(Env.RUN_DIR)
        forking = ["-m", "cluster_ddp.runtime.fork", f"--ranks={ranks}"]
        forking += [f"--log-dir={run_dir}"] if run_dir else []
        return [*command[:at], *forking, "--", *command[at:]], env
    if options.launcher == "torchrun":
        cpus = env.get(Env.CPUS_PER_TASK) or str(options.cpus_per_task or 1)
        env["OMP_NUM_THREADS"] = env.get("OMP_NUM_THREADS") or cpus
        rank = ["rank", *(["--ignore-warnings"] if ignore_warnings else []), "--"]
        around = [*agent(), *rank, *command]
        return [*_torchrun(command, env), *(around if options.container is None else containers.in_image(around))], env
    return command, env


def _torchrun(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """torchrun's agent of one node. Warnings pass it by: it would end its workers after them, saved or not."""
    return [
        *(python_command.interpreter(command), "-m", "torch.distributed.run"),
        f"--nnodes={env.get('SLURM_JOB_NUM_NODES', '1')}",
        f"--nproc-per-node={env['LOCAL_WORLD_SIZE']}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        f"--rdzv-conf=is_host={int(env['NODE_RANK'] == '0')}",
        f"--rdzv-id={env.get('SLURM_JOB_ID') or env[Env.LOCAL_JOB_ID]}.{env.get('SLURM_RESTART_COUNT', '0')}",
        f"--local-addr={env.get('SLURMD_NODENAME') or env['MASTER_ADDR']}",
        *("--max-restarts=0", "--no-python"),
    ]


def in_container(options: Options, command: list[str], env: dict[str, str], ignored: bool) -> Prepared:
    """Return a command as it runs in the job's Apptainer container; as it is if the job has none.

    Args:
        options: of the job.
        command: inside.
        env: its environment.
        ignored: whether it starts with warnings ignored.
    """
    if options.container is None:
        return Prepared(command, env)
    folders = [str(Path.cwd()), env[Env.NOTES], *([env[Env.RUN_DIR]] if env.get(Env.RUN_DIR) else [])]
    times = Path(env.get(Env.JOB_TIMES, "")).parent
    folders += [str(times)] if Env.JOB_TIMES in env and times.is_dir() else []  # the batch host has it
    # The agent's own, which starts torchrun's workers: of an array, it is beside the run directory.
    folders = [*dict.fromkeys([*folders, str(Path(agent()[-1]).parent)])]
    container = Container(options.container, options.container_bind, options.container_overlay)
    words, more = containers.apptainer(container, command, env, folders=folders, ignore_warnings=ignored)
    return Prepared(words, {**env, **more})


def _examined(options: Options, env: Mapping[str, str], rank: int | None, notes: Notes, client: Client) -> int:
    """Run the doctor before the ranks: it takes seconds. Returns its exit status."""
    env = dict(env)
    if rank is None:  # one examines the node, which stands for a rank
        env[Env.GPUS_PER_TASK] = str(int(env["LOCAL_WORLD_SIZE"]) * options.gpus_per_task)
        env = {name: value for name, value in env.items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        if Env.LOCAL_JOB_ID in env:
            env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        rank = int(env.get("RANK") or env["SLURM_PROCID"])
    held = [signal.SIGTERM]  # any other waits for the ranks
    keeper = Keeper(notes, lambda end: client.say("ended", **end._asdict()) if end.status else None, held=held)
    keeper.start(rank, [python_command.interpreter(options.command), "-m", "cluster_ddp.doctor", "--quick"], env)
    return keeper.keep()


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
