"""The nodes of a job's allocation: which train, which are spares, which are left out."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster_ddp.agent import place
from cluster_ddp.agent.job import scontrol


class Reason(NamedTuple):
    """Why a node is left out."""

    words: str
    is_at_fault: bool = True
    """Whether each requeue has to exclude it, as long as the job knows of it."""


LOST = Reason("the node does not answer", is_at_fault=False)  # Slurm finds it down
BEFORE = Reason("left out before", is_at_fault=False)  # the requeue that came then has excluded it


class Nodes(NamedTuple):
    """Nodes, in the order of the allocation: Slurm numbers ranks by it."""

    allocated: tuple[str, ...]
    training: tuple[str, ...]
    left_out: Mapping[str, Reason] = {}

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that can replace others."""
        return tuple(one for one in self.allocated if one not in self.training and one not in self.left_out)

    def losing(self, lost: Sequence[str]) -> Nodes:
        """Return these nodes without those that are lost. Who trained there is still in `training`."""
        return self._replace(allocated=tuple(node for node in self.allocated if node not in lost))

    def without(self, out: Mapping[str, Reason]) -> Nodes | None:
        """Return the nodes that train if some are left out, too; None if there are too few."""
        left_out = {**self.left_out, **out}
        kept = [node for node in self.training if node not in left_out]
        spares = [node for node in self.spares if node not in left_out]
        chosen = {*kept, *spares[: len(self.training) - len(kept)]}
        if len(chosen) < len(self.training):
            return None
        return Nodes(self.allocated, tuple(node for node in self.allocated if node in chosen), left_out)


def of_job(env: Mapping[str, str], spares: int) -> Nodes | None:
    """Return the nodes of a job; the last ones are the spares. None if Slurm does not name them.

    Args:
        env: the environment of the batch script.
        spares: number of spares.
    """
    names = scontrol.hostnames(env)
    return Nodes(names, names[: len(names) - spares]) if len(names) > spares else None


def is_lost(node: str, slurmd_port: int) -> bool:
    """Whether Slurm's daemon on a node can't be reached."""
    return not place.listens(node, slurmd_port)


def resize(nodes: Nodes, env: Mapping[str, str]) -> str:
    """Make a job smaller, so that it outlives the end of a node that it gives back.

    scontrol writes slurm_job_N_resize.* into the working directory: a folder of its own.

    Returns:
        Why Slurm refused; empty if it did not.
    """
    with tempfile.TemporaryDirectory(prefix="cluster_ddp-resize-") as folder:
        argv = ["scontrol", "update", f"JobId={env['SLURM_JOB_ID']}", f"NodeList={','.join(nodes.allocated)}"]
        answer = scontrol.ask(argv, env, with_stderr=True, folder=folder)
    return "" if answer.is_ok else answer.words
