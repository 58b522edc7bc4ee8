"""How the ranks of a job are started: srun's command, for both launchers and for containers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.agent.job import job_log
from cluster_ddp.agent.launch_env import Shape
from cluster_ddp.agent.launch_options import AgentOptions, words
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.supervision.spawn import agent, spawn
from cluster_ddp.agent.task import rank_command, staged_env
from cluster_ddp.run.names import Env, File

# What the job has asked for each of its tasks. Of other tasks, srun would warn (24.11), or prefer it.
_ABOUT_TASKS = ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK")
# What the job has asked for as a whole: a step on some of its nodes would ask for it, too.
_ABOUT_NODES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE")
_BINDINGS = ("SLURM_TRES_BIND", "SLURM_GPU_BIND")  # of GPUs


class On(NamedTuple):
    """Where a step runs, if the job may restart its ranks."""

    nodes: tuple[str, ...] = ()
    """Its nodes; empty for all of the job."""
    is_beside: bool = False
    """Whether another step may still hold the job's CPUs, GPUs and memory."""
    is_first: bool = True
    """Whether it is the first since the job began or was requeued: with `--doctor` its nodes are examined."""

    def of(self, size: Shape) -> Shape:
        """Return the shape of a job, as it is on these nodes."""
        return size._replace(nodes=len(self.nodes)) if self.nodes else size

    def options(self) -> list[str]:
        """Return srun's options."""
        where = [f"--nodes={len(self.nodes)}", f"--nodelist={','.join(self.nodes)}"] if self.nodes else []
        return [*where, *(["--overlap", "--mem=0"] if self.is_beside else [])]


ALL = On()
"""On all nodes, with nothing beside it."""


def srun(options: AgentOptions, size: Shape, folder: Path | None, on: On = ALL) -> list[str]:
    """Return the command that starts the tasks of a job."""
    command = ["srun", *_tasks(on.of(size), options.launcher), *on.options(), "--kill-on-bad-exit=1"]
    if folder is not None and options.launcher == "srun":  # with fork, each rank has a log of its own
        log = str(folder).replace("%", "%%") + "/" + File.TASK_LOG.format("%t")
        command += [f"--output={log}", "--open-mode=append"]
    command += options.srun_options
    words = task(options)
    if options.container_image is not None:
        frozen = [str(Path(word).parent) for word in words[:4] if word.endswith(".pyz")]
        folders = dict.fromkeys([str(Path.cwd()), *([str(folder)] if folder is not None else []), *frozen])
        command += rank_command.pyxis_options(options.container_image, options.container_binds, folders=[*folders])
        words = rank_command.in_image(words)
    return [*command, *words]


def task(options: AgentOptions) -> list[str]:
    """Return the command of a task's agent."""
    return [*agent(), "task", *_of_task(options)]


def spares(options: AgentOptions, size: Shape, nodes: Sequence[str]) -> list[str]:
    """Return the command that starts an agent on each spare node."""
    on = On(tuple(nodes), is_beside=True)
    return ["srun", *_tasks(on.of(size)), *on.options(), *agent(), "spare", *_of_task(options)]


def _of_task(options: AgentOptions) -> list[str]:
    """The job's options, without what the job does with them before and after."""
    return words(replace(options, grid={}, cleanup=None))


def _tasks(size: Shape, launcher: str = "") -> list[str]:
    """Return srun's options for the tasks: one for each rank with srun; else one on each node, with all CPUs and GPUs.

    --cpus-per-task is repeated because srun of Slurm 22.05 to 23.02 does not take it from the job.
    """
    each, cpus = (size.ranks_per_node, size.cpus_per_task) if launcher == "srun" else (1, size.node_cpus)
    options = [f"--ntasks={size.nodes * each}", f"--ntasks-per-node={each}"]
    options += [] if cpus is None else [f"--cpus-per-task={cpus}"]
    if size.gpus_per_task and each != size.tasks_per_node and size.gpus_per_node:
        # Else each task would ask for the GPUs of one of the job's.
        options.append(f"--gres=gpu:{size.gpus_per_node}")
    return options


def step_env(options: AgentOptions, size: Shape, env: Mapping[str, str], on: On = ALL) -> dict[str, str]:
    """Return srun's environment. Its tasks, and nodes, may be others than the job's."""
    each = size.ranks_per_node if options.launcher == "srun" else 1
    if on.nodes:
        env = {name: value for name, value in env.items() if name not in _ABOUT_NODES}
    return dict(env) if each == size.tasks_per_node else _without_tasks(env)


def staged(options: AgentOptions, size: Shape, env: Mapping[str, str]) -> dict[str, str]:
    """Let each node unpack the environment of --stage-env. Returns the variables that name it for the tasks.

    A node that can't (its disk is full, say) says so; its ranks use the environment where it is.
    """
    if options.stage_env is None or options.venv is None:
        return {}
    copy, start = staged_env.new_name(env["SLURM_JOB_ID"]), time.monotonic()
    size = size._replace(nodes=size.nodes + options.spare_nodes)
    command = ["srun", *_tasks(size), *agent(), "unpack", options.stage_env, options.venv]
    done = subprocess.run(command, env={**_without_tasks(env), Env.COPY: copy})
    if done.returncode == 0:
        job_log.say(f"Unpacked the environment on {size.nodes} node(s) in {time.monotonic() - start:.0f} s.")
    return {Env.COPY: copy}


def clean_up(options: AgentOptions, env: Mapping[str, str], status: int) -> None:
    """Run the lines for bash that follow the ranks, whose exit status is `status`; wait for their end."""
    if options.cleanup is not None:
        command, env = ["bash", "-c", options.cleanup], {**env, "status": str(status)}
        os.waitpid(spawn(command, env, default=signals.PASSED_ON), 0)


def _without_tasks(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name not in _ABOUT_TASKS and not (name in _BINDINGS and "per_task" in value)
    }
