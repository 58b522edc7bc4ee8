"""`cluster-ddp completion bash|zsh`: print a script for the shell, which then completes verbs, options and choices.

bash                       cluster-ddp completion bash >~/.local/share/bash-completion/completions/cluster-ddp
zsh                        cluster-ddp completion zsh >FOLDER/_cluster-ddp, with a FOLDER of your fpath
a shell that runs already  eval "$(cluster-ddp completion bash)"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import exit_on_error

PROGRAM = "cluster-ddp completion"
SHELLS = ("bash", "zsh")
# What the values are: "JOB" may be a run directory.
_FOLDERS = {"JOB", "JOB|RUN_DIR", "RUN_DIR"}
_FILES = {"PATH", "PREFIX", "FILE", "SCRIPT.py", "CHECKPOINT", "OUTPUT"}


def parser() -> Parser:
    """The command line."""
    top = Parser(PROGRAM, description=__doc__)
    top.add_argument("shell", choices=SHELLS, help="the shell that runs the script")
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, print the script. Returns the exit status."""
    import shtab

    with exit_on_error(PROGRAM):
        shell = parser().parse_args(argv).shell
        print(shtab.complete(_all_verbs(shtab.FILE, shtab.DIRECTORY), shell))
    return 0


def _all_verbs(file: object, folder: object) -> argparse.ArgumentParser:
    """One parser of all verbs, whose arguments say whether they are files or folders."""
    from cluster_ddp.__main__ import VERBS, module_of

    top = argparse.ArgumentParser(prog="cluster-ddp")
    top.add_argument("--version", action="store_true", help="print the version")
    verbs = top.add_subparsers()
    for verb, text in VERBS.items():
        made: argparse.ArgumentParser = import_module(module_of(verb)).parser()
        for action in _actions(made):
            value = str(action.metavar)
            if value in _FOLDERS:
                action.complete = folder  # type: ignore[attr-defined]
            elif value in _FILES:
                action.complete = file  # type: ignore[attr-defined]
            elif value.startswith("{"):
                action.choices = value.strip("{}").split(",")
        verbs.add_parser(verb, parents=[made], add_help=False, help=text)
    return top


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser, and those of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
