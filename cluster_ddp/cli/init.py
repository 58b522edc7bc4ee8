"""`cluster-ddp init [SCRIPT.py]`: the first settings and job script of a project, from what this cluster has.

Writes cluster.toml (partition, account, limits) and, for a training script, SCRIPT.sbatch. Overwrites nothing.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import SlurmError, SpecError, counted, exit_on_error, nearest
from cluster_ddp.slurm import partitions
from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.checks import feasibility
from cluster_ddp.submission.cli import options
from cluster_ddp.submission.cli.settings_files import FILE_NAME
from cluster_ddp.submission.render import agent_options, render
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.validation import slurms_time
from cluster_ddp.waiting_notice import named_if_slow

PROGRAM = "cluster-ddp init"
_MODULES = re.compile(r"^(?:cuda|nccl|rocm|python|anaconda3?|miniconda3?|miniforge3?|pytorch)(?:/.*)?$", re.IGNORECASE)

_HEAD = """\
# Settings of the jobs that are submitted from this folder. Written by `cluster-ddp init`; change them as you like.
# Each key is an option of `cluster-ddp submit`, which overrides it. `cluster-ddp submit --show-config` shows them all.
"""
_TIME_S = 3600


def parser() -> Parser:
    """The command line."""
    top = Parser(PROGRAM, description=__doc__)
    top.add_argument("script", nargs="?", type=Path, metavar="SCRIPT.py", help="your training script")
    top.add_argument("--partition", metavar="NAME", help="the partition to use (default: ask)")
    top.add_argument("--account", metavar="NAME", help="the account to charge (default: ask)")
    top.add_argument("--yes", action="store_true", help="ask nothing: take the default, or the first that has GPUs")
    return top


def main(argv: Sequence[str]) -> int:
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
    chosen = [group for group in groups if group.partition == partition]
    parts = (_partitions_text(groups, partition), _account_text(known, account), _size_text(chosen), _time_text(chosen))
    _write(Path(FILE_NAME), "\n".join([_HEAD, *parts, _modules_text()]))
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


def _partitions_text(groups: Sequence[NodeGroup], partition: str | None) -> str:
    lines = ["# The partitions of this cluster (sinfo):"] if groups else ["# sinfo shows the partitions of a cluster."]
    for name, nodes in feasibility.by_partition(groups).items():
        default = " (default)" if nodes[0].default else ""
        kinds: dict[str, int] = {}
        for group in nodes:  # equal nodes in different states are groups of their own
            kinds[_kind(group)] = kinds.get(_kind(group), 0) + group.nodes
        described = "; ".join(f"{counted(count, 'node')} with {kind}" for kind, count in kinds.items())
        lines.append(f"#   {name}{default}: {described}; {_limit(nodes[0])}")
    return "\n".join([*lines, _key("partition", partition, "gpu"), ""])


def _kind(group: NodeGroup) -> str:
    gpus = " and ".join(f"{count} {kind}" if kind else counted(count, "GPU") for kind, count in group.gpus.items())
    mem = f"{group.mem_mb // 1024}G" if group.mem_mb >= 1024 else f"{group.mem_mb}M"
    return f"{gpus or 'no GPUs'}, {counted(group.cpus, 'CPU')}, {mem} of memory"


def _limit(group: NodeGroup) -> str:
    return "no time limit" if group.time_limit_s is None else f"at most {slurms_time(group.time_limit_s)}"


def _account_text(accounts: Sequence[str], account: str | None) -> str:
    without = "# The account to charge, if your cluster asks for one."
    known = f"# Your accounts: {', '.join(accounts)}." if accounts else without
    return "\n".join([known, _key("account", account, "my_project"), ""])


def _size_text(groups: Sequence[NodeGroup]) -> str:
    """GPUs and CPUs. One GPU is the default of `submit`."""
    best = max(groups, key=lambda group: group.gpus_of(None), default=None)
    most = best.gpus_of(None) if best is not None else 0
    lines = [f"# Ranks: one for each GPU. A node here has {most}." if most else "# Ranks: one for each GPU."]
    lines.append(f"# gpus_per_node = {most or 4}")
    if best is not None and len(best.gpus) > 1:
        lines.append(f"# gpu_type = {json.dumps(next(iter(best.gpus)))}  # or {', '.join(list(best.gpus)[1:])}")
    each = max(1, best.cpus // most) if best is not None and most else 4
    lines.append(f"# cpus_per_task = {each}  # for each rank: threads, and processes that load data")
    return "\n".join([*lines, ""])


def _time_text(groups: Sequence[NodeGroup]) -> str:
    limits = [group.time_limit_s for group in groups if group.time_limit_s is not None]
    limit = f" The partition allows {slurms_time(max(limits))}." if limits else ""
    shortest_s = min([_TIME_S, *limits])
    shortest = json.dumps(slurms_time(shortest_s))
    return f"# Time limit of a job. Shorter jobs start sooner.{limit}\ntime = {shortest}\n"


def _key(name: str, value: str | None, example: str) -> str:
    return f"# {name} = {json.dumps(example)}" if value is None else f"{name} = {json.dumps(value)}"


def _modules_text() -> str:
    """Environment modules that a training may need; at most three."""
    said, names = "# Environment modules that each job loads; `module avail` shows them.", ["cuda/12.8"]
    listing = "type module >/dev/null 2>&1 && module -t avail 2>&1"
    with suppress(OSError, subprocess.TimeoutExpired):
        with named_if_slow("module avail to answer"):
            command = ["bash", "-lc", listing]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
        found = [line.strip().removesuffix("(default)") for line in done.stdout.splitlines()]
        # Lmod lists folders, too.
        names = [name for name in found if _MODULES.match(name) and not name.endswith("/")][:3] or names
    return f"{said}\n# modules = [{', '.join(map(json.dumps, names))}]\n"


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
