"""The options of `launch`, which are those of a job's agent; and how they reach the agents of its tasks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from cluster_ddp.agent.option_types import count, number, one_range

LAUNCHERS = ("srun", "fork")

_SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}


class Options(NamedTuple):
    """What to start, and what to do when it ends."""

    command: tuple[str, ...] = ()
    """What each rank runs."""
    launcher: str = "srun"
    """What starts the ranks of a node: srun, or a process that forks them."""
    ranks: int | None = None
    """Number of ranks on this machine, without Slurm; None in a job of Slurm."""
    ranks_per_node: int | None = None
    """Number of ranks on each node; None for what Slurm gave."""
    gpus_per_task: int = 1
    """Number of GPUs that each rank drives."""
    cpus_per_task: int | None = None
    """On this machine: number of CPUs of each rank."""
    run_dir: str | None = None
    """The run directory; %j in it stands for the job, 12 or 12_3, and %a for the array's task, 3."""
    code: str | None = None
    """Where the ranks run; None for here."""
    share: bool = False
    """Whether the group may read the run directory."""
    max_requeues: int = 20
    """How often the job is started again after it was stopped in time."""
    chain: bool = False
    """Whether the job is one of a chain."""
    restarts: int = 0
    """How often the ranks are started again after a failure: in the allocation, or after a requeue."""
    nodes: str | None = None
    """The range of nodes that the job asked for, such as 2-8: it may restart with fewer than it has. None for none."""
    spare_nodes: int = 0
    """How many nodes of the job take no ranks, until they replace one that is lost or at fault."""
    hang_restart_s: int = 0
    """How many seconds after a hang's warning ranks that do not answer end a start; 0 for never."""
    restart_args: str = ""
    """Words that are added to the command from the second start on, as a shell would split them."""
    doctor: bool = False
    """Whether the nodes are examined first."""
    track: tuple[str, ...] = ()
    """Names of trackers."""
    time_limit_s: int | None = None
    """On this machine: time limit of each start, in seconds. Of a packed task: of all in one job."""
    venv: str | None = None
    """The virtual environment that `stage_env` holds."""
    stage_env: str | None = None
    """An archive of it, which each node unpacks."""
    container: str | None = None
    """Image for Apptainer or Singularity."""
    container_image: str | None = None
    """Image for Pyxis."""
    container_bind: tuple[str, ...] = ()
    """More folders for the container."""
    container_overlay: tuple[str, ...] = ()
    """Overlays of an Apptainer container."""
    srun_options: tuple[str, ...] = ()
    """More options for srun."""
    cleanup: str | None = None
    """Lines for bash, once the ranks have ended and before a requeue; their status is in $status."""
    grid: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Values of each placeholder of the command in an array; the last one varies fastest."""
    function: bool = False
    """Whether the command is submitit's runner, which calls a pickled function."""
    ignore_warnings: bool = False
    """Of a task: whether its command may be sent a warning (USR1, USR2) before it has a handler."""
    stays: bool = False
    """Of a task: whether the job may have its command started again."""
    pack: int | None = None
    """Of a job that holds tasks of an array: how many run at a time. None: the job is one task."""
    jobs: int = 1
    """How many such jobs the array has."""
    array: str = ""
    """The numbers of all tasks, as sbatch takes them."""
    signal: str = ""
    """Of such a task: the signal before its time limit, such as USR1@120."""


def add_to(top: argparse.ArgumentParser) -> None:
    """Add the options before the two dashes to a parser, in groups."""
    _starting(top.add_argument_group("the ranks"))
    _ending(top.add_argument_group("their end"))
    _surroundings(top.add_argument_group("where they run"))


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line at its first "--" into the options and the command."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def made(found: argparse.Namespace, command: Sequence[str]) -> Options:
    """Return the options that a parser has found, with the command."""
    values = {name: value for name, value in vars(found).items() if name in Options._fields}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Options(**{**values, **lists, "command": tuple(command)})


def parse(program: str, words: Sequence[str]) -> Options:
    """Return the options of a command line of the agent, which a script or another agent has written.

    Raises:
        SystemExit: they are wrong (status 2).
    """
    top = argparse.ArgumentParser(prog=program, usage="%(prog)s [OPTIONS] -- COMMAND …", allow_abbrev=False)
    add_to(top)
    for flag in ("--ignore-warnings", "--stays"):
        top.add_argument(flag, action="store_true")
    for option in ("--array", "--signal"):
        top.add_argument(option, default="")
    for option in ("--pack", "--jobs"):
        top.add_argument(option, type=count, default=Options._field_defaults[option[2:]])
    own, command = split(words)
    found = top.parse_args(own)
    if not command:
        top.error("there is no command")
    return made(found, command)


def words(options: Options) -> list[str]:
    """Return options as words of a command line, without those that have their default; the inverse of `parse`.

    Each option is one word, with its value if it has one: so the value may begin with a dash.
    """
    found: list[str] = []
    for name, value in options._asdict().items():
        if name == "command" or value == Options._field_defaults[name]:
            continue
        option = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(option)
        elif isinstance(value, Mapping):
            found.append(f"{option}={json.dumps(dict(value))}")
        else:
            found += [f"{option}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return [*found, "--", *options.command]


def _starting(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--launcher", choices=LAUNCHERS, default="srun", help="what starts the ranks of a node (srun)")
    add("--ranks", type=count, metavar="N", help="start so many ranks on this machine, without Slurm")
    add("--ranks-per-node", type=count, metavar="N", help="ranks on each node (the job's tasks, or one for each GPU)")
    add("--gpus-per-task", type=count, default=1, metavar="N", help="GPUs that each rank drives (1)")
    add("--cpus-per-task", type=count, metavar="N", help="with --ranks: CPUs of each rank")
    add("--srun-options", action="append", default=[], metavar="OPTION", help="one more option for srun")
    add("--doctor", action="store_true", help="examine the nodes first; a problem ends the job with a verdict")
    add("--track", **_SEVERAL, metavar="TRACKER", help="tensorboard, wandb, mlflow")
    add("--grid", type=json.loads, default={}, help=argparse.SUPPRESS)
    add("--function", action="store_true", help=argparse.SUPPRESS)


def _ending(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "start it again at most so often after it was stopped in time, status 75 (20)"
    add("--max-requeues", type=number, default=20, metavar="N", help=text)
    add("--chain", action="store_true", help=argparse.SUPPRESS)
    text = "start it again at most so often after a failure: in its allocation, else by a requeue (0)"
    add("--restarts", type=number, default=0, metavar="N", help=text)
    text = "the job's range of nodes (#SBATCH --nodes=2-8): a restart continues with those that are left"
    add("--nodes", type=one_range, metavar="MIN-MAX", help=text)
    text = "keep so many nodes of the job as spares, which replace nodes that are lost or at fault (0)"
    add("--spare-nodes", type=number, default=0, metavar="K", help=text)
    text = "restart if ranks do not answer for so many seconds after a hang's warning (never)"
    add("--hang-restart-s", type=number, default=0, metavar="S", help=text)
    text = "words that are added to the command from the second start on: '--resume last.pth'"
    add("--restart-args", default="", metavar="WORDS", help=text)
    text = "for bash, once the ranks have ended, before a requeue; $status is theirs: 'rm -rf \"$SCRATCH\"'"
    add("--cleanup", metavar="LINES", help=text)
    add("--time-limit-s", type=count, metavar="S", help="with --ranks: time limit of each start, in seconds")


def _surroundings(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "run directory, for logs, metrics and checkpoints; %%j in it stands for the job's id"
    add("--run-dir", metavar="PATH", help=text)
    add("--share", action="store_true", help="let your group read the run directory")
    add("--code", metavar="PATH", help=argparse.SUPPRESS)
    add("--venv", metavar="PATH", help=argparse.SUPPRESS)
    add("--stage-env", metavar="ARCHIVE", help=argparse.SUPPRESS)
    add("--container", metavar="IMAGE", help="run the ranks in an Apptainer or Singularity container")
    add("--container-image", metavar="IMAGE", help="run the ranks in a Pyxis container")
    add("--container-bind", **_SEVERAL, metavar="PATH", help="more folders for the container")
    add("--container-overlay", **_SEVERAL, metavar="FILE", help="overlays of an Apptainer container")
