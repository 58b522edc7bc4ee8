"""How long a rank takes to find its place, by the number of ranks: `python benchmarks/topology_scale.py`.

The environments are as srun sets them, with 8 tasks a node and three kinds of node list: numbered nodes in one bracket,
every other one of them, and names that nothing can compress. Prints JSON, and a table to standard error.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

from growth import exponent
from record import Figure, report
from tables import table

from cluster_ddp.slurm import port
from cluster_ddp.slurm.hostlist import expand
from cluster_ddp.slurm.topology import Topology

TASKS_PER_NODE = 8
SIZES = (8, 64, 256, 1024, 4096, 16_384, 100_000)
# The growth is fitted from this number of ranks on. Below it, reading the other variables takes most of the time.
_LARGE = 1024
NODE_LISTS: dict[str, Callable[[int], str]] = {
    "one bracket": lambda nodes: f"n[00001-{nodes:05d}]",
    "every other node": lambda nodes: f"n[{','.join(str(2 * node) for node in range(1, nodes + 1))}]",
    "no brackets": lambda nodes: ",".join(f"n{node}x" for node in range(1, nodes + 1)),
}


def environment(rank: int, ranks: int, node_list: str) -> dict[str, str]:
    """What srun would set for a rank, with blocks of `TASKS_PER_NODE` ranks on each node."""
    nodes = ranks // TASKS_PER_NODE
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % TASKS_PER_NODE),
        "SLURM_NODEID": str(rank // TASKS_PER_NODE),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": node_list,
        "SLURM_STEP_TASKS_PER_NODE": f"{TASKS_PER_NODE}(x{nodes})",
        "SLURM_GPUS_ON_NODE": str(TASKS_PER_NODE),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="numbers of ranks (default: %(default)s)")
    arguments = parser.parse_args()
    works = dict[str, Callable[[int], Callable[[], object]]]()
    works["port candidates"] = lambda ranks: lambda: port.candidates(4711, ranks)
    for kind, node_list in NODE_LISTS.items():
        works[f"hostlist, {kind}"] = functools.partial(_expansion, node_list)
    for kind, node_list in NODE_LISTS.items():
        works[f"Topology, {kind}"] = functools.partial(_reading, node_list)
    seconds = {
        name: {ranks: [_seconds(work(ranks)) for _ in range(arguments.rounds)] for ranks in arguments.ranks}
        for name, work in works.items()
    }
    growth = {
        name: _growth({ranks: min(taken) for ranks, taken in by_ranks.items()}) for name, by_ranks in seconds.items()
    }
    figures = [
        Figure(what=f"{name}, {ranks} ranks", values=[1000 * one for one in taken], unit="ms per rank")
        for name, by_ranks in seconds.items()
        for ranks, taken in by_ranks.items()
    ]
    report(*figures, growth_with_the_ranks=growth)
    rows = [
        [name, *(f"{1000 * min(taken):.3f}" for taken in by_ranks.values()), f"{growth[name]:.2f}"]
        for name, by_ranks in seconds.items()
    ]
    print(table(["ms per rank", *map(str, arguments.ranks), "exponent"], rows), file=sys.stderr)


def _expansion(node_list: Callable[[int], str], ranks: int) -> Callable[[], object]:
    text = node_list(ranks // TASKS_PER_NODE)
    return lambda: expand(text)


def _reading(node_list: Callable[[int], str], ranks: int) -> Callable[[], object]:
    last = environment(ranks - 1, ranks, node_list(ranks // TASKS_PER_NODE))
    return lambda: Topology.from_environ(last)


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of one call: the mean of as many as fit into 20 ms."""
    start, calls = time.perf_counter(), 0
    while True:
        work()
        calls += 1
        if (taken := time.perf_counter() - start) > 0.02:
            return taken / calls


def _growth(cost_by_ranks: dict[int, float]) -> float:
    large = {ranks: cost for ranks, cost in cost_by_ranks.items() if ranks >= _LARGE}
    return round(exponent(large if len(large) > 1 else cost_by_ranks), 2)


if __name__ == "__main__":
    main()
