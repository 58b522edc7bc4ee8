"""`cluster-ddp launch`: start the ranks of a job, and say how they ended. It is what a batch script ends with.

exec cluster-ddp launch -- python train.py            in a batch script, in place of srun python train.py
cluster-ddp launch -- python train.py                 in a shell of salloc
cluster-ddp launch --ranks 4 -- python train.py       on this machine, in place of torchrun or accelerate launch
cluster-ddp launch --dry-run -- python train.py       what would be started, and with which variables

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. In a job, the number of ranks is that of its
tasks, or one for each GPU if a node has one task. Signals reach the ranks once they can take them. If a rank was
stopped in time (status 75), the job is requeued. If one fails, the last lines name the rank that failed first; with
--restarts N all ranks then start again, and with --spare-nodes K without the node that is lost or at fault.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from cluster_ddp.agent import launch_options
from cluster_ddp.agent.__main__ import PROGRAM
from cluster_ddp.agent.job import inherited_env, launch_job
from cluster_ddp.agent.job.local_job import LocalJob
from cluster_ddp.agent.job.start_loop import BaseJob
from cluster_ddp.agent.launch_options import AgentOptions, RankOptions
from cluster_ddp.argument_parser import ASKED, HELP_ALL, Parser, add_fields, joined, value_of
from cluster_ddp.errors import SpecError, counted, exit_on_error
from cluster_ddp.option_form import flag, form_of
from cluster_ddp.run.names import Env
from cluster_ddp.slurm.variables import JOB_NODES, Variables
from cluster_ddp.submission.checks import command_mistakes, script_mistakes
from cluster_ddp.submission.cli.options import OF_RANKS, is_sbatchs
from cluster_ddp.submission.frozen import frozen_agent
from cluster_ddp.submission.spec_rules import check_ranks
from cluster_ddp.submission.validation import check_fields

_WITH_RANKS = {"cpus_per_task": "--cpus-per-task", "time_limit_s": "--time"}
"""Options for ranks on this machine, and those of a batch script that a job has in their place."""
_DAILY = (
    *("--ranks", "--ranks-per-node", "--cpus-per-task", "--run-dir", "--restarts", "--spare-nodes", "--launcher"),
    *("--doctor", "--dry-run"),
)
_SHOWN_FIRST = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def parser(*, with_texts: bool = True) -> Parser:
    """The options before the two dashes.

    Args:
        with_texts: read the fields' docstrings for --help, which takes some milliseconds.
    """
    top = Parser(PROGRAM, usage="%(prog)s [OPTIONS] -- COMMAND …", description=__doc__, daily=_DAILY)
    top.add_argument("--dry-run", action="store_true", help="show what would be started, and start nothing")
    left_out = {"command", *(one.name for one in fields(AgentOptions) if form_of(one).is_for_agent)}
    own, ranks = top.add_argument_group("where the ranks run"), top.add_argument_group("the ranks")
    add_fields(own, AgentOptions, with_texts=with_texts, left_out=left_out | OF_RANKS)
    add_fields(ranks, RankOptions, with_texts=with_texts, left_out=left_out)
    return top


def main(argv: Sequence[str]) -> int:
    """Start the ranks, and wait for their end. Returns the exit status."""
    with exit_on_error(PROGRAM):
        own, command = launch_options.split(argv)
        own = joined(own, "--restart-args", "--srun-options")
        found = _parsed(own, command)
        asked = _options(found, command)
        check_fields(asked)
        env = inherited_env.own(os.environ)
        _check_place(asked, env)
        _check_range(asked, env)
        check_ranks(asked)
        job = launch_job.job_of(asked, env)
        size = job.size
        script_mistakes.refuse_windows_lines(job.options.command, Path.cwd())
        command_mistakes.check_launcher(job.options.command, tasks=size.world_size, gpus=size.gpus_per_node)
        if not found.dry_run:
            _start_frozen(job)
            return launch_job.run(job)
        print(preview(job))
        return 0


def _parsed(own: list[str], command: list[str]) -> argparse.Namespace:
    """The options before the two dashes. The command stands behind them, since its own words may look like options."""
    top = parser(with_texts=not {"-h", "--help", HELP_ALL}.isdisjoint(own))
    found, rest = top.parse_known_args(own)
    if rest and not rest[0].startswith("-") and not command:
        at = own.index(rest[0])
        meant = f"{PROGRAM} {shlex.join([*own[:at], '--', *own[at:]])}"
        raise SpecError(ASKED, f"{rest[0]!r} must stand behind two dashes, as the command does.", meant)
    if rest and is_sbatchs(rest[0]):
        option = shlex.join([rest[0], *filter(None, [value_of(rest) if "=" not in rest[0] else ""])])
        hint = f"#SBATCH {option}, at the top of the batch script; or: salloc {option}"
        raise SpecError(f"Starting ranks with {rest[0]}:", "it is an option of the job, which has started.", hint)
    if not command and not rest:
        hint = f"give it behind two dashes: {PROGRAM} {shlex.join([*own, '--', 'python', 'train.py'])}"
        raise SpecError(ASKED, "there is no command.", hint)
    return top.parse_args(own) if rest else found


def _options(found: argparse.Namespace, command: Sequence[str]) -> AgentOptions:
    """What was given."""
    values = {name: value for name, value in vars(found).items() if value is not None and name != "dry_run"}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return AgentOptions(**{**values, **lists}, command=tuple(command))


def _check_place(asked: AgentOptions, env: Mapping[str, str]) -> None:
    """Refuse --ranks where Slurm starts the ranks, its absence where Slurm has started something, and what lacks it."""
    job, is_in_step = env.get("SLURM_JOB_ID"), Variables(env).step_id() is not None
    if asked.ranks is None:
        for name, instead in _WITH_RANKS.items():
            if getattr(asked, name) is not None:
                option, found = flag(name), "it goes with --ranks, for ranks on this machine."
                hint = f"in a job, at the top of the batch script: #SBATCH {instead}=…"
                raise SpecError(f"Starting ranks with {option}:", found, hint)
        if job and is_in_step:
            found = f"this is a step of job {job}, which srun has started; a step can't start others."
            hint = f"{PROGRAM} without srun before it; in a shell of srun --pty: --ranks N, for ranks on this node"
            raise SpecError("Starting the ranks of the job:", found, hint)
    elif asked.ranks_per_node is not None:
        raise SpecError(ASKED, "--ranks and --ranks-per-node exclude each other.", "--ranks N for this machine")
    elif job and not is_in_step:
        found = f"this shell is in job {job} of Slurm, whose nodes and GPUs the ranks are to use."
        hint = f"leave out --ranks, for as many as the job's tasks; for another number: --ranks-per-node {asked.ranks}"
        raise SpecError(f"Starting {counted(asked.ranks, 'rank')} on this machine:", found, hint)
    elif spares := asked.spare_nodes:
        found = "ranks on this machine have no other node."
        raise SpecError(f"Starting ranks with --spare-nodes {spares}:", found, "leave out --spare-nodes")
    elif launch_options.mebibytes(asked.max_mem):
        found = "ranks on this machine have all of its memory."
        raise SpecError(f"Starting ranks with --max-mem {asked.max_mem}:", found, "leave out --max-mem")


def _check_range(asked: AgentOptions, env: Mapping[str, str]) -> None:
    """Refuse a range of nodes that is not the job's, or has no use."""
    if asked.nodes is None:
        return
    given, (least, most) = f"Starting ranks with --nodes {asked.nodes}:", launch_options.node_range(asked.nodes)
    if least == most:
        found = "the number of nodes is an option of the job, which has started; here it is a range, MIN-MAX."
        hint = f"#SBATCH --nodes={most}, at the top of the batch script; or: salloc --nodes {most}"
        raise SpecError(given, found, hint)
    if asked.ranks is not None:
        raise SpecError(given, "ranks on this machine have no other node.", "leave out --nodes")
    if asked.spare_nodes:
        found = "a range has no spares: after the loss of a node, the job continues with those that are left."
        raise SpecError(given, found, "leave out --spare-nodes")
    if not asked.restarts:
        found = "only restarts use it: after the loss of a node, the ranks start again on those that are left."
        raise SpecError(given, found, f"--restarts 3 --nodes {asked.nodes}; or leave out --nodes")
    nodes = Variables(env).integer(*JOB_NODES) or 1
    if not least <= nodes <= most:
        found = f"the job has {counted(nodes, 'node')}."
        raise SpecError(given, found, f"the range of the job: #SBATCH --nodes={asked.nodes}; or leave out --nodes")


def _start_frozen(job: BaseJob) -> None:
    """If the agent is to run in a container, go on as the frozen one: the installed package is not in there."""
    asked = job.options
    image = asked.container_image
    if image is None:
        return
    if isinstance(job, LocalJob):
        found = "srun starts such containers, by Pyxis, its plugin; ranks on this machine have no srun."
        raise SpecError(f"Running the ranks in {image}:", found, "--container IMAGE, for Apptainer")
    if job.folder is None:
        found = "what starts them there is written into the run directory, and none is given."
        raise SpecError(f"Running the ranks in {image}:", found, "--run-dir PATH, on a file system of all nodes")
    launch_job.make_run_dir(job.folder, shared=asked.share)
    agent = frozen_agent.write(job.folder.absolute())
    os.execv(sys.executable, [sys.executable, "-I", "-S", str(agent), "job", *launch_options.words(asked)])


def preview(job: BaseJob) -> str:
    """Return what would be started, and the variables of rank 0; never the secret, which a job makes as it begins."""
    nodes, each = job.size.nodes, job.size.ranks_per_node
    where = "" if nodes == 1 else f" on {counted(nodes, 'node')}, {each} on each"
    place = {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", **job.added}
    shown = [*_SHOWN_FIRST, *sorted(name for name in place if name not in (*_SHOWN_FIRST, Env.SECRET))]
    is_alone = isinstance(job, LocalJob) and job.options.launcher == "srun"
    lines = [f"{counted(nodes * each, 'rank')}{where}, {'each ' if is_alone else ''}started by", ""]
    lines += _wrapped(job.command())
    lines += ["", "Beside the variables of this shell, rank 0 gets", ""]
    return "\n".join([*lines, *(f"  {name}={shlex.quote(place[name])}" for name in shown)])


def _wrapped(words: Sequence[str]) -> list[str]:
    """A command for bash: a program with its options, one or more in each line, then what it runs."""
    at = list(words).index("--")
    lines = textwrap.wrap(shlex.join(words[:at]), 110, break_long_words=False, break_on_hyphens=False)
    return [*(f"  {line} \\" for line in lines), f"    -- {shlex.join(words[at + 1 :])}"]
