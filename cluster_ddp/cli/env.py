"""`cluster-ddp env`: show this process's place in its job, as a table, JSON or shell exports.

srun python -m cluster_ddp env                      which rank is on which node
eval "$(cluster-ddp env --export)"                  set RANK, LOCAL_RANK, WORLD_SIZE … for a script
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import exit_on_error
from cluster_ddp.slurm.topology import Topology

PROGRAM = "cluster-ddp env"


def parser() -> Parser:
    """The command line."""
    top = Parser(PROGRAM, description=__doc__)
    form = top.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one line of JSON")
    form.add_argument("--export", action="store_true", help="print export lines for the shell's eval")
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, read the environment, print. Returns the exit status."""
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(argv)
        topology = Topology.from_environ(os.environ)
        if arguments.json:
            print(json.dumps(_fields(topology)), flush=True)
        elif arguments.export:
            for name, value in topology.exports().items():
                print(f"export {name}={shlex.quote(value)}")
        else:
            # One write, so that the tables of several tasks don't mix.
            sys.stdout.write("".join(f"{name:17} {_shown(v)}\n" for name, v in _fields(topology).items()))
    return 0


def _fields(topology: Topology) -> dict[str, object]:
    fields = dataclasses.asdict(topology)
    return {"master_port": topology.master_port, **fields} | {"key": topology.key}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
