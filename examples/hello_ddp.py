"""Print each rank's place and do one all-reduce: the shortest distributed program. `sbatch jobs/hello_ddp.sbatch`"""

import socket

import cluster_ddp

with cluster_ddp.distributed() as world:
    lines = world.gather(f"rank {world.rank} of {world.world_size} on {socket.gethostname()}, {world.device}")
    world.print("\n".join(lines))
    total = world.sum(world.rank)
    world.print(f"The sum of all ranks is {total:g}.")
