"""The command line of a submission: an option for each field of JobSpec, and options of the submission itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from cluster_ddp.agent.command_program import program_words, target
from cluster_ddp.agent.launch_options import RESTARTS_BEFORE
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
from cluster_ddp.errors import SpecError
from cluster_ddp.submission.cli import option_mistakes
from cluster_ddp.submission.spec import JobSpec, Launcher
from cluster_ddp.submission.spec_rules import EXPEDITE
from cluster_ddp.submission.validation import legal_name

_CLUSTERS = ("cpus_per_task", "mem", "time", "partition", "account", "qos", "requeue")
_DEFAULTS = dict.fromkeys(_CLUSTERS, "the cluster's")


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command line at its first "--" into our options and the command, which is None without "--"."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    ours = [f"--sbatch-options={EXPEDITE}" if word == EXPEDITE else word for word in words[:at]]
    ours = joined(ours, "--sbatch-options", "--srun-options", "--restart-args")
    return ours, words[at + 1 :] if at < len(words) else None


def parser(program: str, description: str, *, with_texts: bool) -> Parser:
    """Make the parser. An option that is not given is None, or False for a flag.

    Args:
        program: name of the command.
        description: text for --help.
        with_texts: read the fields' docstrings for --help, which takes some milliseconds.
    """
    top = Parser(
        program, usage="%(prog)s [OPTIONS] [OPTIONS OF THE REFERENCE JOB | -- COMMAND …]", description=description
    )
    job = top.add_argument_group("the job (each option is also a key of cluster.toml)")
    forms: dict[str, Mapping[str, Any]] = {"launcher": {"metavar": f"{{{','.join(get_args(Launcher))}}}"}}
    forms |= {name: {"metavar": "PATH"} for name in ("venv", "template")}
    forms |= {"nodes": {"metavar": "N|MIN-MAX"}, "gpus_per_node": {"metavar": "N", "type": _gpus_per_node}}
    left_out = ("command", "description", "grid", "array", "max_nodes")
    add_fields(job, JobSpec, with_texts=with_texts, left_out=left_out, forms=forms, defaults=_DEFAULTS)
    array = "task numbers such as 0-7%%4, or a grid: KEY=VALUES …, with {KEY} in the command"
    job.add_argument("--array", nargs="+", metavar="KEY=VALUES", help=array)
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
    for habit in ("--ntasks", "--ntasks-per-node", *RESTARTS_BEFORE):
        how.add_argument(habit, type=int, help=argparse.SUPPRESS)


def refuse(rest: Sequence[str], legal: Sequence[str], program: str, command: Sequence[str]) -> None:
    """Refuse unknown words before the two dashes of a command.

    Args:
        rest: the words that the parser does not know.
        legal: the options.
        program: name of the command, for the hint.
        command: the user's command, to which they may belong; empty without one.

    Raises:
        SpecError: there is such a word. The error names the nearest option.
    """
    if not rest:
        return
    option_mistakes.refuse(rest)
    option = rest[0].partition("=")[0]
    if not command or not option.startswith("-") or nearest_options(option, legal):
        raise unknown(rest, legal, program)
    hint = f"if your command takes it: -- {shlex.join([*command, *rest])}; the options here: {program} --help"
    raise SpecError(ASKED, f"there is no option {option}.", hint)


def names(program: str) -> list[str]:
    """Return the options of a submission, for suggestions."""
    return parser(program, "", with_texts=False).option_names()


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
