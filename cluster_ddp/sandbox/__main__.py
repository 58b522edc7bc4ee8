"""`cluster-ddp sandbox`: a real multi-node Slurm on this machine.

up      start it: --nodes 4 --gpus-per-node 2 [--install] [--name NAME] [--slurm PREFIX | --slurm-version 26.05]
run     run a command on its login node: run -- sbatch jobs/mnist_2node.sbatch
shell   start a shell on its login node
status  show its nodes and jobs
down    stop it, and remove every trace of it
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import SandboxError, exit_on_error
from cluster_ddp.sandbox import accounting, cluster, daemons, prerequisites, slurm_download
from cluster_ddp.slurm import commands

PROGRAM = "cluster-ddp sandbox"
DEFAULT_NAME = "sandbox"


def parser() -> Parser:
    """The command line."""
    top = Parser(PROGRAM, description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    common = Parser(add_help=False)
    common.add_argument("--name", default=DEFAULT_NAME, help="name of the sandbox (default: %(default)s)")
    up = verbs.add_parser("up", parents=[common], help="start it")
    up.add_argument("--nodes", type=int, default=4, help="number of compute nodes (default: %(default)s)")
    up.add_argument("--gpus-per-node", type=int, default=2, help="number of dummy GPUs on each (default: %(default)s)")
    up.add_argument("--install", action="store_true", help="install Slurm with apt-get, if needed")
    accounts = "with accounts and limits, as on a shared cluster (MariaDB and slurmdbd)"
    up.add_argument("--accounting", action="store_true", help=accounts)
    which = up.add_mutually_exclusive_group()
    which.add_argument("--slurm", type=Path, metavar="PREFIX", help="prefix of another Slurm (default: the PATH's)")
    which.add_argument(
        "--slurm-version",
        choices=sorted(slurm_download.SUITES),
        help="a Slurm from Debian's packages, unpacked into ~/.cache/cluster_ddp (a download of 30 MB)",
    )
    verbs.add_parser("down", parents=[common], help="stop it, and remove every trace of it")
    status = verbs.add_parser("status", parents=[common], help="show its nodes and jobs")
    status.add_argument("--json", action="store_true", help="print one line of JSON")
    verbs.add_parser("shell", parents=[common], help="start a shell on its login node")
    run = verbs.add_parser("run", parents=[common], help="run a command on its login node")
    run.add_argument("command", nargs="+", metavar="-- COMMAND …", help="the command")
    return top


def up(arguments: argparse.Namespace) -> int:
    """Start a sandbox and print how to use it."""
    start = time.monotonic()
    if arguments.install:
        prerequisites.install()
        if arguments.accounting:
            prerequisites.install(accounting.PROGRAMS, accounting.PACKAGES)
    slurm = slurm_download.fetch(arguments.slurm_version) if arguments.slurm_version else arguments.slurm
    layout = cluster.up(
        arguments.name,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        slurm=slurm,
        with_accounting=arguments.accounting,
        stays=True,
    )
    name = "" if arguments.name == DEFAULT_NAME else f" --name {arguments.name}"
    path = "" if slurm is None else f" PATH={layout.slurm}/bin:{layout.slurm}/sbin:$PATH"
    print(
        f"The sandbox {layout.name!r} is up after {time.monotonic() - start:.1f} s: "
        f"{layout.nodes} nodes with {layout.gpus_per_node} GPUs each.\n"
        f"  {PROGRAM} run{name} -- sinfo   # or sbatch SCRIPT, or cluster-ddp submit …\n"
        f"  export SLURM_CONF={layout.slurm_conf}{path}   # for any shell\n"
        f"  {PROGRAM} down{name}"
    )
    return 0


def down(arguments: argparse.Namespace) -> int:
    """Stop and remove a sandbox."""
    existed = cluster.down(arguments.name)
    print(f"The sandbox {arguments.name!r} {'is gone' if existed else 'did not exist'}.")
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Show a sandbox's nodes and jobs."""
    env = cluster.environment(arguments.name)
    nodes = daemons.node_states(env)
    if arguments.json:
        lines = commands.run(["squeue", "--noheader", "--format=%i\t%T\t%N\t%j"], env=env).splitlines()
        jobs = [dict(zip(("job", "state", "nodes", "name"), line.split("\t"))) for line in lines]
        print(json.dumps({"nodes": nodes, "jobs": jobs}))
        return 0
    for node, state in nodes.items():
        print(f"{node:10} {state}")
    print(commands.run(["squeue"], env=env), end="")
    return 0


def run(arguments: argparse.Namespace) -> NoReturn:
    """Run a command on the login node, and end as it does."""
    env = cluster.environment(arguments.name)
    sys.stdout.flush()
    try:
        # In this process' place: Ctrl-C and the exit status are the command's. Python ignores SIGPIPE, others don't.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvpe(arguments.command[0], arguments.command, env)
    except OSError as error:
        command = shlex.join(arguments.command)
        found, hint = f"{error.strerror}.", f"your shell must find it, too: type {shlex.quote(arguments.command[0])}"
        raise SandboxError(f"Running {command} on the login node:", found, hint) from error


def shell(arguments: argparse.Namespace) -> NoReturn:
    """Start a shell on the login node, and end as it does."""
    cluster.environment(arguments.name)  # is it up?
    print(f"A shell on the login node of {arguments.name!r}; leave it with exit.", flush=True)
    arguments.command = [os.environ.get("SHELL", "/bin/sh")]
    run(arguments)


VERBS = {"up": up, "down": down, "status": status, "run": run, "shell": shell}


def main(argv: list[str] | None = None) -> int:
    """Parse, call, print. Returns the exit status."""
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(argv)
        return VERBS[arguments.verb](arguments)


if __name__ == "__main__":
    sys.exit(main())
