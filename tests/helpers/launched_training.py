"""Ranks of the launchers' contract that use torch and cluster_ddp: `python -m mypkg.train trains`, or `… leaves`."""

import os
import pathlib
import socket
import sys
import time

run_dir = pathlib.Path(os.environ["CLUSTER_DDP_RUN_DIR"])
(run_dir / f"begun-{os.environ['RANK']}").write_text(f"{os.getpid()} {socket.gethostname()}\n")
while sys.argv[1] == "trains" and not (run_dir / "go").exists():  # a warning comes before anything is imported
    time.sleep(0.02)
import torch, cluster_ddp  # noqa: E401, E402, I001

with cluster_ddp.distributed() as world:
    torch.distributed.all_reduce(torch.ones(1))
    if sys.argv[1] == "leaves":  # rank 1 does, without a word and with status 0. Its peer's error is not the cause.
        if world.rank == 1:
            os._exit(0)
        torch.distributed.all_reduce(torch.ones(1))
