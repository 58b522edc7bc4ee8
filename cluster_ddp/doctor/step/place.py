"""Which rank this process is, as far as the environment says it: a doctor speaks also where a training can't start."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.protocol import Env
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import Variables


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank, its host and its step."""

    rank: int
    """The rank; 0 if nothing says it."""
    world_size: int
    """Number of ranks; 1 if nothing says it."""
    host: str
    """Name of this host."""
    step: str
    """Job and step, such as "12.0", and the starts before; equal on all ranks of a step, different for two steps."""
    topology: Topology | None = None
    """The whole place; None if the environment contradicts itself."""
    error: ClusterDDPError | None = None
    """Why there is no topology."""

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank checks its node, for the others there."""
        return self.topology is None or self.topology.local_rank == 0

    @staticmethod
    def of(env: Mapping[str, str]) -> Place:
        """Return the place that an environment describes.

        Args:
            env: an environment, such as os.environ.
        """
        v = Variables(env)
        host = variables.node_name(env)
        step = f"{_text(v, variables.JOB_ID)}.{_text(v, variables.STEP_ID)}"
        if restarts := v.text(*variables.RESTART_COUNT):  # a job that starts again has the same numbers
            step += f".{restarts}"
        try:
            topology = Topology.from_environ(env)
        except ClusterDDPError as error:
            if v.step_id() is None:  # in the batch shell, where nobody else comes
                return Place(rank=0, world_size=1, host=host, step=step, error=error)
            rank, world_size = _number(v, variables.RANK), _number(v, variables.WORLD_SIZE) or _tasks(v)
            return Place(rank=rank or 0, world_size=world_size or 1, host=host, step=step, error=error)
        return Place(rank=topology.rank, world_size=topology.world_size, host=host, step=step, topology=topology)


def exchange_dir(place: Place, env: Mapping[str, str]) -> Path:
    """Return the folder of the reports: in the run directory, or else in the working folder."""
    folder = Path(env.get(Env.RUN_DIR) or Path.cwd())
    return folder / f".doctor-{re.sub(r'[^0-9A-Za-z.]', '_', place.step)}"


def _text(v: Variables, names: tuple[str, ...]) -> str:
    return v.text(*names) or "-"


def _tasks(v: Variables) -> int:
    with contextlib.suppress(ClusterDDPError):
        return sum(v.tasks_per_node() or ())
    return 0


def _number(v: Variables, names: tuple[str, ...]) -> int | None:
    with contextlib.suppress(ClusterDDPError):
        return v.integer(*names)
    return None
