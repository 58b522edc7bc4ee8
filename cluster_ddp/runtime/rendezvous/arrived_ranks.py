"""Which ranks have arrived: each writes a key into the store. The keys are read in batches, not one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

    from cluster_ddp.slurm.topology import Topology

# The store's server parses a request again for each 4 KiB that arrive (torch 2.15). The time for one request over all
# ranks would grow with their square. It refuses more than 131,072 keys.
_KEYS_AT_ONCE = 1024
_NAMED_AT_MOST = 8


def arrival(rank: int) -> str:
    """Return the key of the store for a rank's host name and kind of device. The value is such as "node1 cuda"."""
    return f"arrived/{rank}"


def batches(keys: Sequence[str]) -> list[Sequence[str]]:
    """Split keys into batches for one request each."""
    return [keys[start : start + _KEYS_AT_ONCE] for start in range(0, len(keys), _KEYS_AT_ONCE)]


def unset(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Return the keys that the store does not have, with some 2·log2(keys) requests for each missing key."""
    if len(keys) > _KEYS_AT_ONCE:
        return [key for batch in batches(keys) for key in unset(store, batch)]
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    middle = len(keys) // 2
    return [*unset(store, keys[:middle]), *unset(store, keys[middle:])]


def values(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Return the values of keys that the store has."""
    return [value.decode() for batch in batches(keys) for value in store.multi_get(list(batch))]


def hosts(store: dist.Store, ranks: Sequence[int]) -> list[str]:
    """Return the host names of ranks that have arrived."""
    return [host for host, _ in arrivals(store, ranks)]


def arrivals(store: dist.Store, ranks: Sequence[int]) -> list[tuple[str, str]]:
    """Return host name and kind of device ("cpu" or "cuda") of ranks that have arrived."""
    parts = [value.partition(" ") for value in values(store, [*map(arrival, ranks)])]
    return [(host, device_type) for host, _, device_type in parts]


def with_common_restarts(topology: Topology, store: dist.Store) -> Topology:
    """Return the topology with the highest `agent_restarts` of all ranks. A collective of ranks that have met."""
    if topology.launcher != "torchrun":
        return topology
    store.set(f"restarts/{topology.rank}", str(topology.agent_restarts))
    if topology.rank == 0:
        keys = [f"restarts/{rank}" for rank in range(topology.world_size)]
        store.set("restarts", str(max(map(int, values(store, keys)))))
    more = int(store.get("restarts")) - topology.agent_restarts
    return replace(topology, restart_count=topology.restart_count + more, agent_restarts=topology.agent_restarts + more)


def odd_devices(arrived: Sequence[tuple[str, str]]) -> str | None:
    """Return which ranks have another kind of device than most, in words; None if all have the same.

    `arrived` has host name and kind of device of all ranks, in their order.
    """
    kinds = Counter(device_type for _, device_type in arrived)
    if len(kinds) < 2:
        return None
    most, count = max(kinds.items(), key=lambda kind: (kind[1], kind[0]))
    odd = [f"rank {rank} on {host}: {kind}" for rank, (host, kind) in enumerate(arrived) if kind != most]
    more = f", and {len(odd) - _NAMED_AT_MOST} more" if len(odd) > _NAMED_AT_MOST else ""
    return f"{'; '.join(odd[:_NAMED_AT_MOST])}{more}. The other {count}: {most}."


def missing_by_node(topology: Topology, arrived: dict[int, str]) -> list[str]:
    """Return the ranks that have not arrived, with their nodes if these are certain: ["6", "7 (node4)"].

    They are certain if only one node lacks ranks, or if the arrived ranks are placed as by block distribution.
    `arrived` is rank -> host name.
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
