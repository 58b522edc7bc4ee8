"""The address of rank 0's host, and the ports to try there.

Preset MASTER_ADDR and MASTER_PORT win. If there may be several nodes, localhost is never used: each node would make a
world of its own.
"""

from __future__ import annotations

from cluster_ddp.errors import HostlistError, TopologyError
from cluster_ddp.slurm import hostlist, variables
from cluster_ddp.slurm.variables import Variables

LOCALHOST = "127.0.0.1"


def node_names(v: Variables, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the hosts of the first variable in `names` that is set; empty if none is.

    Raises:
        HostlistError: its value is not a hostlist.
    """
    name = v.first(*names)
    try:
        return () if name is None else tuple(hostlist.expand(v.env[name]))
    except HostlistError as error:
        raise HostlistError(f"Reading {name}: {error.asked}", error.found, error.hint) from error


def step_address(v: Variables, nodes: tuple[str, ...], num_nodes: int | None) -> str:
    """Return MASTER_ADDR if preset, else the step's first node, on which rank 0 runs.

    Raises:
        TopologyError: no node is known, or MASTER_ADDR is a node of the job on which rank 0 of this step does not run.
    """
    preset = v.text("MASTER_ADDR")
    if preset is None:
        return nodes[0] if nodes else _localhost(v, variables.NODELIST, several_nodes=num_nodes != 1)
    if nodes and preset != nodes[0] and preset in node_names(v, variables.JOB_NODELIST):
        found = f"{v.shown('MASTER_ADDR', 'SLURM_STEP_NODELIST')}: rank 0 of this step runs on {nodes[0]}."
        hint = "unset MASTER_ADDR MASTER_PORT before an srun on part of the job's nodes"
        raise TopologyError(f"Meeting rank 0 on {preset}:", found, hint)
    return preset


def hand_set_address(v: Variables, *, several_nodes: bool) -> str:
    """Return MASTER_ADDR if preset, else the loopback address.

    Raises:
        TopologyError: MASTER_ADDR is not preset, and there may be several nodes.
    """
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return v.text("MASTER_ADDR") or _localhost(v, of_ranks, several_nodes=several_nodes)


def _localhost(v: Variables, names: tuple[str, ...], *, several_nodes: bool) -> str:
    if several_nodes:
        found = f"{v.shown('MASTER_ADDR', *names)}: the ranks may be on several nodes, and no node is named."
        hint = "export MASTER_ADDR=<host of rank 0>, or, if all ranks are on this node, LOCAL_WORLD_SIZE=$WORLD_SIZE"
        raise TopologyError("Finding the host of rank 0:", found, hint)
    return LOCALHOST


def port_candidates(v: Variables, ours: tuple[int, ...], templates: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the ports to try: `ours`, or MASTER_PORT alone if it is preset to another port.

    A preset port that is in `ours` or `templates` is the free one that a batch script found. It then comes first, and
    the others of its tuple follow. A batch script does not know the step id, so its candidates are others.

    Raises:
        TopologyError: MASTER_PORT is not a TCP port.
    """
    preset = v.integer("MASTER_PORT")
    if preset is None:
        return ours
    if not 1 <= preset <= 65535:
        found = f"{v.shown('MASTER_PORT')} is not a TCP port (1 to 65535)."
        raise TopologyError("Reading MASTER_PORT:", found, "unset MASTER_PORT; a free port is then chosen")
    for walk in (ours, templates):
        if preset in walk:
            start = walk.index(preset)
            return walk[start:] + walk[:start]
    return (preset,)
