"""How ranks can find each other in plain PyTorch, and what `cluster_ddp.distributed` makes unnecessary.

python examples/init_methods.py

Here two processes meet in each way, on this machine. In a job you write none of this: `with cluster_ddp.distributed()`
reads the launcher's variables, takes a port that is free, and names the ranks that are missing.
"""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def meet(rank: int, method: str) -> None:
    """Join the process group in one way, and add up the numbers of the ranks. Runs in a process of its own."""
    if method == "env://":  # what torchrun and our jobs set; the default
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        dist.init_process_group("gloo")
    else:  # rank and size must be told
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    assert total == sum(range(RANKS))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """A port that is free now. Another program may take it before rank 0 does: jobs of ours try others then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Start the ranks with spawn, which passes each its number, once for each way."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for method, needs in (
            ("env://", "MASTER_ADDR and MASTER_PORT, RANK and WORLD_SIZE in the environment"),
            (f"tcp://127.0.0.1:{free_port()}", "rank 0's address and a free port, known to all"),
            (
                f"file://{Path(folder, 'store')}",
                "a file that does not exist yet, on a file system that all nodes share",
            ),
        ):
            mp.spawn(meet, args=(method,), nprocs=RANKS)
            print(f"{method.split('/')[0]}// works. It needs {needs}.")


if __name__ == "__main__":
    main()
