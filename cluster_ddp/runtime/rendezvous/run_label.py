"""The label of a run outside Slurm, where no job id tells it: all its ranks, and all its restarts, have the same."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from cluster_ddp.run.names import Env
from cluster_ddp.slurm.topology import Topology

log = logging.getLogger("cluster_ddp")

_FORM = re.compile(r"\d{8}-\d{6}")
_KEY = "cluster_ddp/run_label"
_AGENT_PATIENCE = timedelta(seconds=10)


def now() -> str:
    """Return a label made of this node's date and time."""
    return time.strftime("%Y%m%d-%H%M%S")


def common(topology: Topology, store: dist.Store, env: Mapping[str, str]) -> str:
    """Return the label that rank 0 gives. A collective of ranks that have met."""
    if topology.rank == 0:
        label = _of_torchruns_agent(env)
        if not label and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and Env.RUN_DIR not in env:
            log.warning(
                "torchrun's store does not answer: after a restart by torchrun, a run directory that you have not "
                "named is another one. Hint: %s=PATH",
                Env.RUN_DIR,
            )
        store.set("run_label", label or now())
    return store.get("run_label").decode()


def _of_torchruns_agent(env: Mapping[str, str]) -> str:
    """The label of torchrun's first start, which its agent's store keeps over restarts; empty without such a store."""
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    with contextlib.suppress(dist.DistError, ValueError, KeyError):
        port = int(env["MASTER_PORT"])
        agents = dist.TCPStore(env["MASTER_ADDR"], port, timeout=_AGENT_PATIENCE, wait_for_workers=False)
        label = agents.compare_set(_KEY, "", now()).decode()
        return label if _FORM.fullmatch(label) else ""  # anybody may write there, and it becomes a path
    return ""
