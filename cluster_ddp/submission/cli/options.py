"""The command line of a submission: an option for each field of JobSpec, and options of the submission itself."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from cluster_ddp.agent.options import RESTARTS_BEFORE
from cluster_ddp.agent.python_command import is_python, program_words, python_target, shell_script
from cluster_ddp.errors import SpecError
from cluster_ddp.submission.cli import add_on, option_mistakes
from cluster_ddp.submission.cli.parser import ASKED, Parser, joined, nearest_options, unknown
from cluster_ddp.submission.spec import EXPEDITE, JobSpec, Launcher
from cluster_ddp.submission.spec_fields import legal_name

# What the cluster chooses, if nothing is given.
_CLUSTERS = ("cpus_per_task", "mem", "time", "partition", "account", "qos", "requeue")
_PATHS = ("venv", "template")


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
    top = _Parser(
        program, usage="%(prog)s [OPTIONS] [OPTIONS OF THE REFERENCE JOB | -- COMMAND …]", description=description
    )
    texts = field_texts(JobSpec) if with_texts else {}
    job = top.add_argument_group("the job (each option is also a key of cluster.toml)")
    for field in dataclasses.fields(JobSpec):
        if field.name not in ("command", "description", "grid", "array"):
            _add(job, field, texts.get(field.name, ""))
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
    where.add_argument("--run-dir", metavar="PATH", help="new run directory (default: RUNS_DIR/NAME-JOB_ID)")
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
    program = next(iter(program_words(command)), "job")
    module_or_script = python_target(command).words[:1] if is_python(command) else []
    word = next(iter(module_or_script), "").removesuffix(".py") or Path(shell_script(command) or program).stem
    return legal_name(Path(word).name) or "job"


class _Parser(Parser):
    def hint_for(self, option: str, value: str = "") -> str | None:
        gpus = option_mistakes.gpus(value.strip("'")) if option == "--gpus-per-node" else ""
        return f"{option} {gpus}" if gpus else None


def _add(group: Any, field: dataclasses.Field[Any], text: str) -> None:
    name, kind = "--" + field.name.replace("_", "-"), str(field.type)
    text = (text + _default(field)).replace("%", "%%")
    if kind.startswith("bool"):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif kind.startswith("tuple"):
        group.add_argument(name, action="extend", nargs="+", metavar="TEXT", help=text)
    elif kind.startswith("int"):
        group.add_argument(name, type=int, metavar="N", help=text)
    elif kind == "Launcher":
        group.add_argument(name, metavar=f"{{{','.join(get_args(Launcher))}}}", help=text)
    else:
        group.add_argument(name, metavar="PATH" if field.name in _PATHS else "TEXT", help=text)


def _default(field: dataclasses.Field[Any]) -> str:
    """The default of an option, for its help."""
    if field.default is None:
        return " (default: the cluster's)" if field.name in _CLUSTERS else ""
    return "" if field.default in ((), "", False, dataclasses.MISSING) else f" (default: {field.default})"


def field_texts(fields: type) -> dict[str, str]:
    """Return the docstrings under a dataclass's fields."""
    import ast
    import inspect

    (definition,) = ast.parse(inspect.getsource(fields)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for before, after in zip(definition.body, definition.body[1:]):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            assert isinstance(after.value, ast.Constant)
            texts[before.target.id] = " ".join(str(after.value.value).split())
    return texts


def as_words(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that was given in Python as a tuple.

    Raises:
        SpecError: it is one string, not a sequence of words.
    """
    if isinstance(command, str):
        found = "it is one string, and no shell splits it into words."
        raise SpecError(f"Submitting the command {command!r}:", found, f"give its words: {shlex.split(command)}")
    return tuple(command)
