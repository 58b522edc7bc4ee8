"""`cluster-ddp init [SCRIPT.py]`: the first settings and job script of a project, from what this cluster has.

Writes cluster.toml (partition, account, limits) and, for a training script, SCRIPT.sbatch. Overwrites nothing.
"""

from __future__ import annotations

import argparse
import getpass
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import SlurmError, SpecError, exit_on_error, nearest
from cluster_ddp.slurm import partitions
from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.checks import feasibility
from cluster_ddp.submission.cli import first_cluster_toml, options
from cluster_ddp.submission.cli.settings_files import FILE_NAME
from cluster_ddp.submission.render import agent_options, render
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.waiting_notice import named_if_slow

PROGRAM = "cluster-ddp init"
_MODULES = re.compile(r"^(?:cuda|nccl|rocm|python|anaconda3?|miniconda3?|miniforge3?|pytorch)(?:/.*)?$", re.IGNORECASE)


def parser() -> Parser:
    """The command line."""
    top = Parser(PROGRAM, description=__doc__)
    top.add_argument("script", nargs="?", type=Path, metavar="SCRIPT.py", help="your training script")
    top.add_argument("--partition", metavar="NAME", help="the partition to use (default: ask)")
    top.add_argument("--account", metavar="NAME", help="the account to charge (default: ask)")
    top.add_argument("--yes", action="store_true", help="ask nothing: take the default, or the first that has GPUs")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, ask the cluster and the user, write the files. Returns the exit status."""
    with exit_on_error(PROGRAM):
        return _init(parser().parse_args(argv))


def _init(asked: argparse.Namespace) -> int:
    script: Path | None = asked.script
    if script is not None and not script.is_file():
        found = f"there is no such file in {Path.cwd()}."
        raise SpecError(f"Making a job for {script}:", found, "name your training script")
    job_script = None if script is None else Path(f"{script.stem}.sbatch")
    for path in filter(None, (Path(FILE_NAME), job_script)):
        if path.exists() or path.is_symlink():
            found = "it exists already, and nothing is overwritten."
            raise SpecError(f"Writing {path}:", found, f"edit it, or move it away first: mv {shlex.quote(str(path))} …")
    groups = _groups()
    partition = _partition(groups, asked)
    known, fit = _accounts(partition) if groups else ([], [])
    account = _choice("account", asked.account, known, fit, asked.yes)
    if account is not None and account in known and account not in fit:
        others = f" It names {' and '.join(fit)}." if fit else ""
        print(f"warning: The partition {partition} does not name the account {account}.{others}", file=sys.stderr)
    settings = first_cluster_toml.text(groups, partition=partition, account=account, accounts=known, modules=_modules())
    _write(Path(FILE_NAME), settings)
    print(f"Written: {FILE_NAME}")
    if script is not None and job_script is not None:
        _write(job_script, _job(script, partition, account))
        print(f"Written: {job_script}, for `sbatch {shlex.quote(str(job_script))}`.")
    command = f"-- python {shlex.quote(str(script or 'my_train.py'))}"
    width = len(f"submit --dry-run {command}")
    print("Next:")
    print(f"  cluster-ddp submit --dry-run {command}    # shows the job")
    print(f"  cluster-ddp {f'submit --watch {command}':{width}}    # submits it and follows it")
    print(f"  cluster-ddp {'status':{width}}    # shows how far your jobs are")
    return 0


def _groups() -> list[NodeGroup]:
    """The cluster's nodes; empty, with a word about it, if Slurm is not here or does not answer."""
    none = f"{FILE_NAME} gets no partition."
    if shutil.which("sinfo") is None:
        print(f"There is no Slurm here (no sinfo on the PATH): {none} Run this on a login node.")
        return []
    try:
        return partitions.read()
    except SlurmError as error:
        print(f"Slurm does not answer here: {error.found} {none} Hint: {error.hint}")
        return []


def _partition(groups: Sequence[NodeGroup], asked: argparse.Namespace) -> str | None:
    """The chosen partition: the one that was asked for, the only one, the default one, or the user's choice."""
    usable = feasibility.by_partition([group for group in groups if group.up])
    default = [name for name, nodes in usable.items() if nodes[0].default]
    with_gpus = [name for name, nodes in usable.items() if any(node.gpus for node in nodes)]
    has_gpus = bool(set(default) & set(with_gpus))
    return _choice("partition", asked.partition, list(usable), default if has_gpus else with_gpus or default, asked.yes)


def _choice(what: str, asked: str | None, names: Sequence[str], first: Sequence[str], yes: bool) -> str | None:
    """One of several names: the one that was asked for, the only one, the first choice with --yes, or the user's."""
    if asked is not None:
        if names and asked not in names:
            found = f"there are {', '.join(names)}.{nearest(asked, names)}"
            raise SpecError(f"Using the {what} {asked}:", found, f"--{what} with one of these names")
        return asked
    default = next(iter([*first, *names]), "")
    if len(names) < 2 or yes:
        return default or None
    if not sys.stdin.isatty():
        found = f"there are {', '.join(names)}, and nobody can be asked."
        raise SpecError(f"Choosing the {what}:", found, f"--{what} {default}, or --yes for that one")
    print(f"Which {what}?")
    for number, name in enumerate(names, start=1):
        print(f"  {number}  {name}")
    try:
        answer = input(f"{what} [{default}]: ").strip()
    except (EOFError, KeyboardInterrupt) as error:
        raise SpecError(f"Choosing the {what}:", "no answer.", f"--{what} NAME, or --yes for {default}") from error
    chosen = names[int(answer) - 1] if answer.isdecimal() and 1 <= int(answer) <= len(names) else answer or default
    return _choice(what, chosen, names, first, yes)


def _accounts(partition: str | None) -> tuple[list[str], list[str]]:
    """The user's accounts, and those that may use the partition; the default one first. Empty without accounting."""
    known: list[str] = []
    with suppress(SlurmError):
        known = partitions.accounts_of(getpass.getuser())
        if partition is not None and known:
            rule = partitions.access(partition)
            return known, [name for name in known if rule.names(name)]
    return known, known


def _modules() -> list[str]:
    """Environment modules that a training may need; at most three."""
    listing = "type module >/dev/null 2>&1 && module -t avail 2>&1"
    try:
        with named_if_slow("module avail to answer"):
            command = ["bash", "-lc", listing]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = [line.strip().removesuffix("(default)") for line in done.stdout.splitlines()]
    return [name for name in names if _MODULES.match(name) and not name.endswith("/")][:3]  # Lmod lists folders, too


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise SpecError(f"Writing {path}:", f"{error.strerror} in {Path.cwd()}.", "run this in your project") from error


def _job(script: Path, partition: str | None, account: str | None) -> str:
    """A batch script for the training, on one GPU."""
    command = ("python", str(script))
    name = options.job_name(command)
    spec = JobSpec(name=name, command=command, partition=partition, account=account, time="1:00:00", requeue=True)
    source = f"Written by `{PROGRAM}`. Submit it from this folder: sbatch {shlex.quote(f'{script.stem}.sbatch')}"
    return render(spec, agent_options(spec), source=source)
