"""1,024 ranks that all find their place, on emulated nodes: environments as srun would set them."""

from __future__ import annotations

import pytest
from ranks import slurm_step

from cluster_ddp.slurm.port import candidates
from cluster_ddp.slurm.topology import Topology

NODE_LISTS = {
    "one bracket": ("n[001-128]", [f"n{node:03d}" for node in range(1, 129)]),
    "racks": ("r[0-7]n[00-15]", [f"r{rack}n{node:02d}" for rack in range(8) for node in range(16)]),
    "gaps": (f"n[{','.join(map(str, range(1, 257, 2)))}]", [f"n{node}" for node in range(1, 257, 2)]),
}
EVEN = ("8(x128)", [8] * 128)
UNEVEN = ("9(x32),7(x32),10(x16),6(x16),15,1,8(x30)", [9] * 32 + [7] * 32 + [10] * 16 + [6] * 16 + [15, 1] + [8] * 30)


@pytest.mark.parametrize("node_list", NODE_LISTS)
@pytest.mark.parametrize(("tasks", "counts"), [EVEN, UNEVEN], ids=["even", "uneven"])
def test_1024_ranks_know_their_places(node_list: str, tasks: str, counts: list[int]) -> None:
    text, nodes = NODE_LISTS[node_list]
    assert (len(nodes), sum(counts)) == (128, 1024)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    for rank, (node_rank, local_rank) in enumerate(places):
        place = {"SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(node_rank)}
        step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "128", "SLURM_STEP_TASKS_PER_NODE": tasks}
        topology = Topology.from_environ(slurm_step(rank, 1024, job_id=4711, nodelist=text, **place, **step))
        assert (topology.rank, topology.node_rank, topology.local_rank) == (rank, node_rank, local_rank)
        assert (topology.world_size, topology.num_nodes) == (1024, 128)
        assert topology.local_world_size == counts[node_rank]
        assert topology.tasks_per_node == tuple(counts)
        assert topology.nodes == tuple(nodes)
        assert (topology.master_addr, topology.port_candidates) == (nodes[0], candidates(4711, 3))
