"""An error that all ranks have before they find each other, such as a wrong launch: a node's first rank prints it.

No rank can ask another one then. But Linux knows whether the first rank of the node still runs; if so, it does not have
the error. srun by itself, without --kill-on-bad-exit, ends no task because another has failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from cluster_ddp import processes
from cluster_ddp.protocol import Env
from cluster_ddp.runtime.console import complain
from cluster_ddp.slurm.variables import node_name

# What all ranks of this start on this node have in common.
_COMMON = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "MASTER_PORT")
# The same below our agent: a rank that waited for its start began with an older port.
_COMMON_OF_OURS = (*_COMMON[:-1], Env.SECRET)
_LOCAL_RANK = ("SLURM_LOCALID", "LOCAL_RANK")
_SILENCE_S = 4.0
_POLL_S = 0.2


def has_said_it(env: Mapping[str, str]) -> bool:
    """Return whether the first rank of this node has ended, and so has said what is wrong; then a line names it.

    Any other rank waits for that, at most four seconds. By then srun (--kill-on-bad-exit) has often ended it. `env` is
    the environment with which this process was started.
    """
    name = next((name for name in _LOCAL_RANK if env.get(name)), None)
    if name is None or env[name] == "0":
        return False
    common = {key: env[key] for key in (_COMMON_OF_OURS if Env.NOTES in env else _COMMON) if env.get(key)}
    own = {**common, name: env[name]}
    # In a container of this rank alone it sees no other: the first process there is its parent, or has its environment.
    is_alone = os.getppid() <= 1 or own.items() <= processes.environment(1).items()
    # A forked rank has the environment of its parent there.
    can_see = bool(common) and not is_alone and os.getpid() in _ranks(own, env)
    deadline = time.monotonic() + _SILENCE_S
    while time.monotonic() < deadline:
        if can_see and not _ranks({**common, name: "0"}, env):
            rank = env.get("SLURM_PROCID") or env.get("RANK") or "?"
            complain(f"[rank {rank} {node_name(os.environ)}] stopped: this node's first rank failed (see its error).")
            return True
        time.sleep(_POLL_S)
    return False


def _ranks(values: Mapping[str, str], env: Mapping[str, str]) -> list[int]:
    """Processes with such an environment, without agents, which have no notes, and may outlive their ranks."""
    found = processes.environments(values)
    return [pid for pid, of_it in found.items() if Env.NOTES not in env or Env.NOTES in of_it]
