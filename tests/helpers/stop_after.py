"""Run a script, and send the last rank USR1 after an optimizer step: `python stop_after.py STEP SCRIPT [ARGUMENT …]`.

It stands for Slurm's warning before the time limit. Step 0: no signal.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

stop_at, done = int(sys.argv.pop(1)), 0
script = sys.argv.pop(1)


def count(*_: Any) -> None:
    global done
    done += 1
    if done == stop_at and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        os.kill(os.getpid(), signal.SIGUSR1)


register_optimizer_step_post_hook(count)
sys.argv[0] = script
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
