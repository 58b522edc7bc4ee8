"""A process's place in its job: environment in, `Topology` out.

    topology = Topology.from_environ(os.environ)
    topology.rank, topology.local_rank, topology.world_size, topology.master_addr, topology.master_port

`cluster-ddp env` prints it. The readers for each launcher are in `environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster_ddp.errors import TopologyError
from cluster_ddp.slurm import environment
from cluster_ddp.slurm.environment import Launcher
from cluster_ddp.slurm.variables import job_label


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One process's place in the world of ranks.

    Raises:
        TopologyError: the numbers contradict each other.
    """

    launcher: Launcher
    """What started the process."""
    rank: int
    """0 … world_size - 1, over all nodes."""
    local_rank: int
    """0 … local_world_size - 1, on this node."""
    world_size: int
    """Number of ranks."""
    local_world_size: int | None = None
    """Number of ranks on this node; None if the environment does not say."""
    node_rank: int | None = None
    """0 … num_nodes - 1; None if the environment does not say."""
    num_nodes: int | None = None
    """Number of nodes; None if the environment does not say."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes in the order of node_rank; empty if unknown."""
    tasks_per_node: tuple[int, ...] = ()
    """Number of ranks on each node, in the same order; empty if unknown."""
    master_addr: str
    """Name or address of the host on which rank 0 runs."""
    port_candidates: tuple[int, ...]
    """Ports that rank 0 tries, in this order: those of the job, or a single port."""
    job_id: int | None = None
    """SLURM_JOB_ID (each array task has its own), or the id of a job on this machine; None outside a job."""
    is_local: bool = False
    """Whether `job_id` is that of a job on this machine: a process id, which Slurm may have for a job, too."""
    chain_id: int | None = None
    """Id of the array of its chain (`--chain`); None outside a chain."""
    array_job_id: int | None = None
    """Job id of the whole array; None outside an array."""
    array_task_id: int | None = None
    """Index of the array task; None outside an array."""
    step_id: int | None = None
    """Id of the step that srun made; None outside a step."""
    restart_count: int = 0
    """Number of starts of the job's ranks before this one: restarts in the allocation and requeues; under torchrun,
    plus `agent_restarts`."""
    agent_restarts: int = 0
    """Number of failures that torchrun's agent of this node has counted: those of its own workers only, though all
    agents start theirs again. So it differs between nodes."""
    start_id: int | None = None
    """Which start of ranks this is, of all in its run directory; None if our agent has not started them."""
    cpus_per_task: int | None = None
    """CPUs requested for each rank; None if unknown."""
    gpus_on_node: int | None = None
    """Number of GPUs that Slurm gave the step on this node; None if unknown."""
    gpus_per_task: int = 1
    """Number of GPUs that each rank drives."""

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, int, str, int | None], ...] = (
            ("rank", self.rank, "world_size", self.world_size),
            ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
            ("node_rank", self.node_rank or 0, "num_nodes", self.num_nodes),
            ("local_world_size", (self.local_world_size or 1) - 1, "world_size", self.world_size),
        )
        for name, value, limit_name, limit in checks:
            if limit is not None and not 0 <= value < limit:
                raise TopologyError(
                    f"Finding this process's place (launcher {self.launcher}):",
                    f"{name}={getattr(self, name)} does not fit {limit_name}={limit}.",
                    "check what is set: env | grep -E 'RANK|WORLD_SIZE|SLURM_'",
                )

    @property
    def master_port(self) -> int:
        """The first port that rank 0 tries."""
        return self.port_candidates[0]

    @property
    def job_label(self) -> str | None:
        """The job as squeue shows it, "12", or "12_3" for an array task; of a chain, its array. None outside a job."""
        return job_label(self.chain_id or self.job_id, self.array_job_id, self.array_task_id) or None

    @property
    def key(self) -> str:
        """A text that differs between runs, also between the restarts of a job, and is equal on all ranks of a run."""
        restart = self.restart_count - self.agent_restarts
        parts = [self.job_id, self.array_task_id, self.step_id, restart, self.world_size]
        parts += [self.master_port] if self.launcher == "torchrun" else []  # a job's step may run it more than once
        return "/".join(["cluster_ddp", self.launcher, *map(str, parts)])

    def exports(self) -> dict[str, str]:
        """Return the variables that torch's env:// and scripts for torchrun read; unknown ones are left out."""
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    @staticmethod
    def from_environ(env: Mapping[str, str]) -> Topology:
        """Read a process's place from its environment.

        The first that applies counts: submitit's local executor; torchrun; a Slurm step; hand-set RANK and WORLD_SIZE;
        a Slurm job of one task without srun; a single process. In a step, hand-set RANK and WORLD_SIZE count only if
        WORLD_SIZE differs from the step's size: the tasks then start their own ranks.

        Raises:
            TopologyError: variables are missing or contradict each other; the error has their names and values.
            TopologyError: a node list that can't be read.
        """
        return Topology(**environment.read(env))
