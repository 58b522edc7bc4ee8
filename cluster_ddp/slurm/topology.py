"""Where a process stands in its job: environment in, `Topology` out.

    topology = Topology.from_environ(os.environ)
    topology.rank, topology.local_rank, topology.world_size, topology.master_addr, topology.master_port

Show it with `cluster-ddp env`. How each launcher is read is in `environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster_ddp.errors import TopologyError
from cluster_ddp.slurm import environment
from cluster_ddp.slurm.environment import Launcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One process's place in the world of ranks.

    Raises:
        TopologyError: the numbers contradict each other.
    """

    launcher: Launcher
    """Who started the process."""
    rank: int
    """0 … world_size - 1, over all nodes."""
    local_rank: int
    """0 … local_world_size - 1, on this node."""
    world_size: int
    """Number of ranks."""
    local_world_size: int | None = None
    """Number of ranks on this node; None where a hand-set environment does not tell."""
    node_rank: int | None = None
    """0 … num_nodes - 1; None where a hand-set environment does not tell."""
    num_nodes: int | None = None
    """Number of nodes; None where a hand-set environment does not tell."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes in the order of their node_rank; empty where nobody names them."""
    tasks_per_node: tuple[int, ...] = ()
    """Number of ranks on each of `nodes`; empty where nobody tells."""
    master_addr: str
    """Host on which rank 0 runs."""
    port_candidates: tuple[int, ...]
    """Ports that rank 0 tries, in this order; one alone where MASTER_PORT was preset to a port of the user's own."""
    launcher_store: bool = False
    """Whether the launcher itself serves the store at master_addr (torchrun's agent does)."""
    job_id: int | None = None
    """SLURM_JOB_ID; each array task has its own."""
    array_job_id: int | None = None
    """The job id of the whole array."""
    array_task_id: int | None = None
    """Which task of the array."""
    step_id: int | None = None
    """The step that srun made."""
    restart_count: int = 0
    """How often the job was requeued (under torchrun: how often the agent restarted its workers)."""
    cpus_per_task: int | None = None
    """CPUs of each rank, as asked for."""
    gpus_on_node: int | None = None
    """GPUs that Slurm gave the step on this node."""
    end_time: int | None = None
    """When Slurm will end the job, in seconds of UNIX time."""

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
                    "see what is set: env | grep -E 'RANK|WORLD_SIZE|SLURM_'",
                )

    @property
    def master_port(self) -> int:
        """The first port that rank 0 tries."""
        return self.port_candidates[0]

    @property
    def job_label(self) -> str | None:
        """The job as squeue shows it, "12" or "12_3"; None outside a job."""
        if self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return None if self.job_id is None else str(self.job_id)

    @property
    def key(self) -> str:
        """What ranks of the same run share and no other run does, a requeued job's former run included."""
        parts = (self.job_id, self.array_task_id, self.step_id, self.restart_count, self.world_size)
        return "/".join(["cluster_ddp", self.launcher, *map(str, parts)])

    def exports(self) -> dict[str, str]:
        """The variables that torch's env:// and scripts written for torchrun read; those not known are left out."""
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

        Understood, in this order: submitit's local executor, torchrun, hand-set RANK and WORLD_SIZE, a step of
        Slurm's, and, where nothing is set, a single process.

        Args:
            env: such as os.environ; only read.

        Raises:
            TopologyError: the variables contradict each other or are not enough; it names them with their values.
            HostlistError: a node list that can't be read.
        """
        return Topology(**environment.read(env))
