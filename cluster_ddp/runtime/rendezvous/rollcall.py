"""Who is there: what the ranks leave in the store about themselves, read without asking for each rank alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

    from cluster_ddp.slurm.environment import Topology

# The store's server reads a request anew with each 4 KiB of it that come (torch 2.15), so that the time for one over
# all ranks would grow with their square; over 131,072 keys it refuses.
_KEYS_AT_ONCE = 1024


def arrival(rank: int) -> str:
    """Under which key of the store a rank has left the name of its host."""
    return f"arrived/{rank}"


def batches(keys: Sequence[str]) -> list[Sequence[str]]:
    """The keys in pieces that the store takes in one request."""
    return [keys[start : start + _KEYS_AT_ONCE] for start in range(0, len(keys), _KEYS_AT_ONCE)]


def unset(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Which of the keys the store does not have: some 2·log2(keys) questions for each of them, not one for each key."""
    if len(keys) > _KEYS_AT_ONCE:
        return [key for batch in batches(keys) for key in unset(store, batch)]
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    middle = len(keys) // 2
    return [*unset(store, keys[:middle]), *unset(store, keys[middle:])]


def hosts(store: dist.Store, ranks: Sequence[int]) -> list[str]:
    """The names of the hosts of ranks that have arrived."""
    values = [value for batch in batches([*map(arrival, ranks)]) for value in store.multi_get(list(batch))]
    return [value.decode() for value in values]


def missing_by_node(topology: Topology, arrived: dict[int, str]) -> list[str]:
    """The ranks that have not arrived, with their nodes where those are certain: ["6", "7 (node4)"].

    They are certain where only one node lacks ranks, or where those that arrived stand as block distribution would have
    them.

    Args:
        topology: of any rank.
        arrived: rank -> name of its host.
    """
    absent = [rank for rank in range(topology.world_size) if rank not in arrived]
    places = [n for n, count in zip(topology.nodes, topology.tasks_per_node) for _ in range(count)]
    if len(places) != topology.world_size:
        return [str(rank) for rank in absent]
    here = Counter(host.split(".")[0] for host in arrived.values())
    short = [node for node, count in zip(topology.nodes, topology.tasks_per_node) if here[node.split(".")[0]] < count]
    if len(short) == 1:
        home = dict.fromkeys(absent, short[0])
    elif all(host.split(".")[0] == places[rank].split(".")[0] for rank, host in arrived.items()):
        home = {rank: places[rank] for rank in absent}
    else:
        return [*map(str, absent[:-1]), f"{absent[-1]} (on {', '.join(short)})"]
    last_of_node = {node: rank for rank, node in home.items()}
    return [f"{rank} ({home[rank]})" if last_of_node[home[rank]] == rank else str(rank) for rank in absent]
