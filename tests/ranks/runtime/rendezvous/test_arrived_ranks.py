"""Who is there and who is not, asked of a real store."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

from cluster_ddp.runtime.rendezvous import arrived_ranks
from cluster_ddp.slurm.topology import Topology


class CountingStore(dist.HashStore):
    """Counts its questions."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return super().check(keys)


@pytest.mark.parametrize("missing", [(), (0,), (2999,), (1023, 1024), (5, 6, 7, 1500), tuple(range(3000))])
def test_the_keys_that_are_missing_are_found(missing: tuple[int, ...]) -> None:
    keys = [f"k{i}" for i in range(3000)]
    store = CountingStore()
    for i in set(range(3000)).difference(missing):
        store.set(keys[i], "")
    assert arrived_ranks.unset(store, keys) == [keys[i] for i in missing]
    few = 2 * len(missing) * math.ceil(math.log2(1024)) + 3
    assert store.asked <= min(few, 2 * len(keys))


def test_hosts_come_in_the_order_of_ranks() -> None:
    store = dist.HashStore()
    for rank in range(2500):
        store.set(arrived_ranks.arrival(rank), f"n{rank // 8}")
    assert arrived_ranks.hosts(store, range(2500)) == [f"n{rank // 8}" for rank in range(2500)]
    assert arrived_ranks.hosts(store, [9, 3]) == ["n1", "n0"]
    assert arrived_ranks.hosts(store, []) == []


def two_nodes(**fields: object) -> Topology:
    return Topology(
        launcher="slurm",
        rank=0,
        local_rank=0,
        world_size=6,
        num_nodes=3,
        nodes=("n1", "n2", "n3.cluster"),
        tasks_per_node=(2, 2, 2),
        master_addr="n1",
        port_candidates=(1,),
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("arrived", "missing"),
    [
        # One node is short: the missing ranks are there, however ranks are distributed.
        ({0: "n1", 1: "n2", 3: "n1", 4: "n2"}, ["2", "5 (n3.cluster)"]),
        # Several are short, and those that came stand in blocks.
        ({0: "n1", 1: "n1", 2: "n2"}, ["3 (n2)", "4", "5 (n3.cluster)"]),
        # Several are short, and ranks are dealt out some other way: the nodes, not who is where.
        ({0: "n1", 1: "n2", 4: "n2"}, ["2", "3", "5 (on n1, n3.cluster)"]),
        ({}, ["0", "1 (n1)", "2", "3 (n2)", "4", "5 (n3.cluster)"]),
    ],
)
def test_missing_ranks_are_named_with_their_nodes(arrived: dict[int, str], missing: list[str]) -> None:
    assert arrived_ranks.missing_by_node(two_nodes(), arrived) == missing
