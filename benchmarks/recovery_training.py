"""What recovery.py disturbs: a small training that notes when rank 0 has completed a step: `python … STEPS_FILE`.

Each rank writes its process id beside it, into STEPS_FILE.HOST.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

STEP_S = 0.1
STEPS_PER_SAVE = 10
HANG_WARNING_S = 5.0


def main(steps: str) -> None:
    """Train for ever."""
    import torch

    import cluster_ddp

    with cluster_ddp.distributed(hang_warning_s=HANG_WARNING_S) as world:
        Path(f"{steps}.{socket.gethostname()}").write_text(str(os.getpid()))
        torch.manual_seed(0)
        model = world.wrap(torch.nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        checkpoint = cluster_ddp.Checkpointer(world, every=f"{STEPS_PER_SAVE}steps", model=model, optimizer=optimizer)
        for _ in checkpoint.until(1_000_000):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            time.sleep(STEP_S)
            checkpoint.step()
            if world.is_main:
                with open(steps, "a") as file:
                    line = {"time": time.time(), "process": os.getpid(), "step": checkpoint.steps}
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
