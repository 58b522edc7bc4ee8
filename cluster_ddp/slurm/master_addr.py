"""Where the ranks meet: the address of rank 0's host and the ports to try there.

Preset MASTER_ADDR and MASTER_PORT win. Never localhost where there may be more than one node: that would make several
worlds of one.
"""

from __future__ import annotations

from cluster_ddp.errors import HostlistError, TopologyError
from cluster_ddp.slurm import hostlist, variables
from cluster_ddp.slurm.variables import Variables

LOCALHOST = "127.0.0.1"


def node_names(v: Variables, names: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts of the first hostlist among `names` that is set; empty if none is."""
    name = next((name for name in names if v.text(name)), None)
    if name is None:
        return ()
    try:
        return tuple(hostlist.expand(v.env[name]))
    except HostlistError as error:
        raise HostlistError(f"Reading {name}: {error.asked}", error.found, error.hint) from error


def step_address(v: Variables, nodes: tuple[str, ...], num_nodes: int | None) -> str:
    """MASTER_ADDR if preset, else the step's first node, on which rank 0 runs."""
    preset = v.text("MASTER_ADDR")
    if preset is None:
        if nodes:
            return nodes[0]
        if num_nodes == 1:
            return LOCALHOST
        raise _no_address(v, *variables.NODELIST)
    if nodes and preset != nodes[0] and preset in node_names(v, variables.JOB_NODELIST):
        raise TopologyError(
            f"Meeting at {preset}:",
            f"{v.shown('MASTER_ADDR', 'SLURM_STEP_NODELIST')}: rank 0 of this step runs on {nodes[0]}.",
            "unset MASTER_ADDR MASTER_PORT before an srun on part of the job's nodes",
        )
    return preset


def hand_set_address(v: Variables, *, several_nodes: bool) -> str:
    """MASTER_ADDR if preset, else this host if there can be no other."""
    preset = v.text("MASTER_ADDR")
    if preset is None and several_nodes:
        raise _no_address(v, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return preset or LOCALHOST


def _no_address(v: Variables, *names: str) -> TopologyError:
    return TopologyError(
        "Finding the host of rank 0:",
        f"{v.shown('MASTER_ADDR', *names)}: the ranks may be on several nodes, and none is named.",
        "export MASTER_ADDR=<host of rank 0>, or, if all ranks are on this node, LOCAL_WORLD_SIZE=$WORLD_SIZE",
    )


def port_candidates(v: Variables, ours: tuple[int, ...], templates: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Ours, unless MASTER_PORT is preset to another.

    A preset that is one of ours, or of the `templates`' (which know no step id), is where a batch script found a free
    one: then the others of its kind follow it.
    """
    preset = v.integer("MASTER_PORT")
    if preset is None:
        return ours
    if not 1 <= preset <= 65535:
        raise TopologyError(
            "Reading MASTER_PORT:",
            f"{v.shown('MASTER_PORT')} is no TCP port (1 to 65535).",
            "unset MASTER_PORT; a free one is then found",
        )
    for walk in (ours, templates):
        if preset in walk:
            start = walk.index(preset)
            return walk[start:] + walk[:start]
    return (preset,)
