"""The environment of every rank of a node, if one srun task represents all of them.

For equal nodes and block distribution, which the templates request. The variables' names are in `variables`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster_ddp.errors import TopologyError
from cluster_ddp.run.names import Env
from cluster_ddp.slurm import environment, hostlist, port, variables
from cluster_ddp.slurm.variables import Variables


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRanks:
    """The ranks of one node."""

    env: Mapping[str, str]
    """The environment of the process that represents them."""
    ranks: int
    """Number of ranks, the same on every node."""
    node_rank: int
    """0 … num_nodes - 1."""
    num_nodes: int
    """Number of nodes."""

    @staticmethod
    def from_environ(env: Mapping[str, str], ranks: int) -> NodeRanks:
        """Read the node rank and the number of nodes.

        They come from an srun step with one task on each node, or from WORLD_SIZE and NODE_RANK. Otherwise this node is
        the only one.

        Raises:
            TopologyError: the variables contradict each other or `ranks`.
        """
        v, asked = Variables(env), f"Forking {ranks} ranks on each node:"
        on_this_machine = env.get("SUBMITIT_EXECUTOR") == "local"
        if not on_this_machine and v.step_id() is not None and v.text(*variables.RANK) is not None:
            num_nodes = v.integer(*variables.NUM_NODES) or 1
            node_rank = v.integer(*variables.NODE_RANK) or 0
            if v.integer(*variables.WORLD_SIZE) != num_nodes:
                found = f"{v.shown(variables.WORLD_SIZE[0], variables.NUM_NODES[0])}: one task on each node is needed."
                raise TopologyError(asked, found, "srun --ntasks-per-node=1 --ntasks=$SLURM_JOB_NUM_NODES …")
        else:
            num_nodes, rest = divmod(v.integer("WORLD_SIZE") or ranks, ranks)
            node_rank = v.integer("NODE_RANK") or 0
            if rest or node_rank >= num_nodes:
                found = f"{v.shown('WORLD_SIZE', 'NODE_RANK')} does not fit {ranks} ranks on each node."
                raise TopologyError(asked, found, "unset both, or set them for equal nodes")
        return NodeRanks(env=env, ranks=ranks, node_rank=node_rank, num_nodes=num_nodes)

    def rank(self, local_rank: int) -> int:
        """Return the rank over all nodes of a local rank."""
        return self.node_rank * self.ranks + local_rank

    def environ(self, local_rank: int, pid: int) -> dict[str, str | None]:
        """Return the variables that a task for this rank alone would have, as far as they may differ from `env`.

        `pid` is the rank's process id. A variable that must be unset is None.

        Raises:
            TopologyError: the address or port of rank 0 is unknown or wrong, or a variable is not a number.
            HostlistError: a node list that can't be read.
        """
        values: dict[str, object] = {
            "RANK": self.rank(local_rank),
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.num_nodes * self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "NODE_RANK": self.node_rank,
            **self._rendezvous(),
        }
        for names, value in self._launchers(local_rank, pid).items():
            values |= {name: value for name in names if name in self.env}
        return {name: None if value is None else str(value) for name, value in values.items()}

    def _launchers(self, local_rank: int, pid: int) -> dict[tuple[str, ...], object]:
        """The launcher's variables with their values. The caller sets only those that the node's task has."""
        rank, first, world_size = self.rank(local_rank), self.rank(0), self.num_nodes * self.ranks
        return {
            variables.RANK: rank,
            variables.LOCAL_RANK: local_rank,
            variables.WORLD_SIZE: world_size,
            variables.TASKS_PER_NODE: f"{self.ranks}(x{self.num_nodes})" if self.num_nodes > 1 else self.ranks,
            variables.NTASKS_PER_NODE: self.ranks,
            variables.CPUS_PER_TASK: self._cpus_per_task(),
            variables.TRES_PER_TASK: self._tres_per_task(),
            (Env.CPUS_PER_TASK,): None,
            variables.DISTRIBUTION: self._distribution(),
            variables.RANKS_ON_NODE: ",".join(map(str, range(first, first + self.ranks))),
            variables.TASK_PID: pid,
            ("SUBMITIT_LOCAL_GLOBALID",): rank,
            ("SUBMITIT_LOCAL_LOCALID",): local_rank,
            ("SUBMITIT_LOCAL_NTASKS",): world_size,
        }

    def _cpus_per_task(self) -> int | None:
        v = Variables(self.env)
        if Env.CPUS_PER_TASK in self.env:
            return v.integer(Env.CPUS_PER_TASK)
        return max(1, (v.integer(*variables.CPUS_PER_TASK) or 1) // self.ranks)

    def _tres_per_task(self) -> str | None:
        cpus, kept = self._cpus_per_task(), []
        for one in (Variables(self.env).text(*variables.TRES_PER_TASK) or "").split(","):
            match = re.fullmatch(r"(cpu[=:])\d+", one)
            kept += [one] if match is None else [f"{match[1]}{cpus}"] if cpus else []
        return ",".join(kept) or None

    def _distribution(self) -> str | None:
        """srun's default is "cyclic" for one task on each node, and "block" for more (srun(1))."""
        said = Variables(self.env).text(*variables.DISTRIBUTION)
        return "block" if said == "cyclic" and self.ranks > 1 else said

    def _rendezvous(self) -> dict[str, object]:
        v = Variables(self.env)
        job_id, step_id = v.integer(*variables.JOB_ID), v.step_id()
        ours = environment.TORCH_DEFAULT_PORT if job_id is None else port.master_port(job_id, step_id or 0)
        nodes = hostlist.of_variable(v, *variables.NODELIST)
        return {
            "MASTER_ADDR": environment.address(v, nodes, self.num_nodes),
            "MASTER_PORT": v.integer("MASTER_PORT") or ours,
        }
