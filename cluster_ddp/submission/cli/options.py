"""The command line of a submission: an option for each field of JobSpec, and options of the submission itself.

Options that were probably meant otherwise are refused or warned of: those of sbatch(1), 22.05 to 26.05, ranges, tiny
times and sizes.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cluster_ddp.agent.command_program import program_words, target
from cluster_ddp.agent.launch_options import RankOptions
from cluster_ddp.argument_parser import (
    ASKED,
    Parser,
    add_fields,
    add_on,
    joined,
    nearest_options,
    unknown,
    whole_number,
)
from cluster_ddp.errors import SpecError, counted
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.job_options import JobOptions
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.spec_rules import EXPEDITE
from cluster_ddp.submission.validation import SET_ELSEWHERE, legal_name

_DAILY = (
    *("--nodes", "--gpus-per-node", "--cpus-per-task", "--mem", "--time", "--partition", "--account", "--restarts"),
    *("--array", "--resume", "--dry-run", "--watch"),
)
OF_RANKS = {one.name for one in fields(RankOptions)}
"""Options that a job shares with `launch`."""

_PASSED_ON = """
    acctg-freq batch bb bbf cluster-constraint clusters comment container container-id contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot distribution exclusive export export-file extra
    extra-node-info get-user-env gid gpu-bind gpu-freq gpus-per-socket gres-flags hint ignore-pbs input
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu mincpus network nice
    no-kill nodefile nodelist overcommit oversubscribe power prefer priority profile propagate reboot reservation
    segment sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time-min tmp tres-bind
    tres-per-task uid use-min-nodes verbose wait-all-nodes wckey
"""
_SBATCHS = SET_ELSEWHERE.union(_PASSED_ON.split()) - {"help", "parsable", "usage", "version"}  # of any program
_LETTERS = "AabCcDdeFGHiJkLMNnOopqSstwx"
# An option of sbatch that means something else -> the option here.
_HERE: Mapping[str, str] = {
    **dict.fromkeys(("-G", "--gpus"), "--gpus-per-node (and --gpu-type)"),
    "--cpus-per-gpu": "--cpus-per-task",
}
_HETEROGENEOUS = (":", "hetjob", "--het", "--het-group", "--pack-group")  # sbatch(1), HETEROGENEOUS JOB SUPPORT
_NO_GRID = r"[\[({].+[\])}]|\d+[-:]\d+|range\(.*\)"  # [1, 2]; 0-3; 0:3; range(3)


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command line at its first "--" into our options and the command, which is None without "--"."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    ours = [f"--sbatch-options={EXPEDITE}" if word == EXPEDITE else word for word in words[:at]]
    ours = joined(ours, "--sbatch-options", "--srun-options", "--restart-args")
    return ours, words[at + 1 :] if at < len(words) else None


def parser(program: str, description: str, *, with_texts: bool, daily: bool = True) -> Parser:
    """Make the parser. An option that is not given is None, or False for a flag.

    Args:
        program: name of the command.
        daily: show only options for each day with --help; all with --help-all.
        description: text for --help.
        with_texts: read the fields' docstrings for --help, which takes some milliseconds.
    """
    usage = "%(prog)s [OPTIONS] [OPTIONS OF THE MNIST TRAINING | -- COMMAND …]"
    top = Parser(program, usage=usage, description=description, daily=_DAILY if daily else ())
    job = top.add_argument_group("the job (each option is also a key of cluster.toml)")
    left_out = {"command", "description", "grid", "array", "max_nodes"}
    forms: Mapping[str, Mapping[str, Any]] = {"nodes": {"type": str}, "gpus_per_node": {"type": _gpus_per_node}}
    add_fields(job, JobOptions, with_texts=with_texts, left_out=left_out | OF_RANKS, forms=forms)
    ranks = top.add_argument_group("its ranks (the same)")
    add_fields(ranks, RankOptions, with_texts=with_texts, left_out=left_out)
    array = "task numbers such as 0-7%%4, or a grid: KEY=VALUES …, with {KEY} in the command"
    job.add_argument("--gres", action=_Gres, metavar="gpu[:TYPE]:N", help="as --gpus-per-node and --gpu-type")
    job.add_argument("--array", "-a", nargs="+", metavar="KEY=VALUES", help=array)
    _add_submission(top.add_argument_group("the submission"))
    return top


def _add_submission(how: Any) -> None:
    """The options of the submission itself."""
    local = "run the job on this machine, not on Slurm"
    how.add_argument("--local", action=argparse.BooleanOptionalAction, default=None, help=local)
    add_on(how)
    how.add_argument("--runs-dir", metavar="PATH", help="folder for run directories (default: runs)")
    where = how.add_mutually_exclusive_group()
    where.add_argument("--run-dir", metavar="PATH", help="new run directory (default: one in RUNS_DIR)")
    resume = "resume an ended job in its run directory; other options override its settings"
    where.add_argument("--resume", metavar="JOB|RUN_DIR", help=resume)
    how.add_argument("--profile", metavar="NAME", help="use the profile [NAME] of cluster.toml")
    how.add_argument(
        "--accept", action="extend", nargs="+", metavar="CODE", help="silence the warnings with these codes"
    )
    for flag, text in (
        ("snapshot", "run a copy of the code as it is now"),
        ("no-check", "do not check whether the job can run"),
        ("watch", "follow the job to its end, and exit with its status"),
        ("dry-run", "print the script and submit nothing"),
        ("test-only", "ask Slurm when the job would start; submit nothing"),
        ("show-config", "print the settings and the origin of each"),
        ("show-template", "print our template of the batch script, to extend it with --template"),
    ):
        how.add_argument(f"--{flag}", action="store_true", help=text)
    for habit in (("--ntasks", "-n"), ("--ntasks-per-node",)):
        how.add_argument(*habit, type=int, help=argparse.SUPPRESS)


class _Gres(argparse.Action):
    """Sets the number of GPUs on each node, and their type, if there is one."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: object) -> None:
        match = re.fullmatch(r"gpu(?::([A-Za-z][\w.-]*))?(?::(\d+))?", value)
        if match is None:
            found = f"it is {value!r}, and must be gpu:N or gpu:TYPE:N: the GPUs of each node."
            raise SpecError("Submitting with --gres:", found, "--gres=gpu:2, or --gpus-per-node 2 --gpu-type a100")
        namespace.gpus_per_node = int(match[2] or 1)
        namespace.gpu_type = match[1] or namespace.gpu_type


def refuse(rest: Sequence[str], legal: Sequence[str], shows_all: str, command: Sequence[str]) -> None:
    """Refuse unknown words before the two dashes of a command.

    Args:
        rest: the words that the parser does not know.
        legal: the options.
        shows_all: the command that shows all options, for the hint.
        command: the user's command, to which they may belong; empty without one.

    Raises:
        SpecError: there is such a word. The error names the nearest option.
    """
    if not rest:
        return
    refuse_sbatchs(rest)
    option = rest[0].partition("=")[0]
    if not command or not option.startswith("-") or nearest_options(option, legal):
        raise unknown(rest, legal, shows_all)
    hint = f"if your command takes it: -- {shlex.join([*command, *rest])}; the options here: {shows_all}"
    raise SpecError(ASKED, f"there is no option {option}.", hint)


def job_name(command: Sequence[str]) -> str:
    """Return a name for a job: that of its script, its module or its program."""
    run = target(command)
    words = run.words if run.kind in ("script", "module") else program_words(command)
    path = Path(next(iter(words), "job"))
    return legal_name(path.name if run.kind == "module" else path.stem) or "job"


def _gpus_per_node(text: str) -> int:
    if ":" in text:  # gpu:a100:2, as for --gres
        found = f"--gpus-per-node is a whole number, not {text!r}."
        raise SpecError(ASKED, found, "such as --gpus-per-node 2; the type of the GPUs: --gpu-type a100")
    return whole_number(text)


def is_sbatchs(word: str) -> bool:
    """Return whether a word of a command line is an option of sbatch, with its value or without."""
    name = word.partition("=")[0]
    return name[2:] in _SBATCHS if name.startswith("--") else name[:1] == "-" and name[1:] in tuple(_LETTERS)


def refuse_sbatchs(words: Sequence[str]) -> None:
    """Refuse options of sbatch that are written otherwise here, and heterogeneous jobs.

    Raises:
        SpecError: there is one. The error names the option to use, or what to do instead.
    """
    for word in words:
        option = word.partition("=")[0]
        if option in _HETEROGENEOUS:
            found = "heterogeneous jobs are not possible here: all ranks of a job have the same GPUs, CPUs and memory."
            hint = "use equal nodes for all ranks: --nodes and --gpus-per-node; or submit independent jobs"
        elif option in _HERE:
            found, hint = "that is sbatch's name; here it is called otherwise.", f"use {_HERE[option]}"
        elif option == "-o" or (option[2:] in SET_ELSEWHERE and is_sbatchs(option)):
            found = "cluster-ddp submit sets it itself, or has no use for it."
            hint = "leave it out; to read the logs: cluster-ddp logs JOB"
        elif option.startswith("--") and is_sbatchs(option):
            found = "it is an option of sbatch; --sbatch-options passes it on."
            hint = f"--sbatch-options={option}, or --sbatch-options={option}=VALUE, without blanks"
        else:
            continue
        raise SpecError(f"Submitting with {option}:", found, hint)


def advise(given: Mapping[str, Any], spec: JobSpec) -> Iterator[Advice]:
    """Warn of numbers of tasks, which follow from the GPUs, of ranges in another notation, of tiny times and sizes.

    Args:
        given: the options that were given.
        spec: the job.

    Raises:
        SpecError: a number of tasks does not match the GPUs.
    """
    cure = "use --nodes and --gpus-per-node instead: the tasks follow from the GPUs"
    for option, needed in (("--ntasks", spec.world_size), ("--ntasks-per-node", spec.ranks_per_node)):
        asked = given.get(option[2:].replace("-", "_"))
        if asked not in (None, needed):
            found = f"one task drives {counted(spec.gpus_per_task, 'GPU')}, so it is {needed} here."
            raise SpecError(f"Submitting with {option} {asked}:", found, cure)
        if asked is not None:
            yield Advice("ntasks", f"{option} is not needed; {cure}.")
    for word in given.get("array") or ():
        key, _, values = word.partition("=")
        if re.fullmatch(_NO_GRID, values):
            text = f"{word} is plain text. For a range of numbers: {key}=FIRST..LAST; for a list: {key}=VALUE,VALUE"
            yield Advice("range", text)
    if match := re.fullmatch(r"[1-4]:\d\d", given.get("time") or ""):
        text = f"--time {match[0]} means minutes and seconds. For hours and minutes: --time {match[0]}:00"
        yield Advice("short", text)
    if re.fullmatch(r"[1-9]\d{0,2}", given.get("mem") or ""):
        yield Advice("short", f"--mem {given['mem']} means MiB. For GiB: --mem {given['mem']}G")
