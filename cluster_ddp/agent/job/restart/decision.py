"""What follows a failure: the ranks start again in the allocation, and on which of its nodes; a requeue; or the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cluster_ddp.agent import launch_env
from cluster_ddp.agent.job import slurm_commands
from cluster_ddp.agent.job.restart.failures import Failed
from cluster_ddp.protocol import Then

_WITHOUT_PROGRESS = 4  # so many failures with the same newest checkpoint: three restarts were of no use


class Reason(NamedTuple):
    """Why a node is left out."""

    words: str
    is_at_fault: bool = True
    """Whether each requeue has to exclude it, as long as the job knows of it."""


LOST = Reason("the node does not answer", is_at_fault=False)  # Slurm finds it down
BEFORE = Reason("left out before", is_at_fault=False)  # the requeue that came then has excluded it


class Nodes(NamedTuple):
    """Nodes, in the order of the allocation: Slurm numbers ranks by it. None, if they are not known."""

    allocated: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    left_out: Mapping[str, Reason] = {}
    least: int = 0
    """With so many, the training continues where it has no spares; 0 if it needs as many as it had."""

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
        if len(chosen) < (self.least or len(self.training)):
            return None
        training = tuple(node for node in self.allocated if node in chosen)
        return self._replace(training=training, left_out=left_out)


UNKNOWN = Nodes()
"""Where Slurm does not name them, or nobody needs to know them."""


def of_job(env: Mapping[str, str], spares: int, least: int = 0) -> Nodes:
    """Return the nodes of a job; the last ones are the spares. `least`: see `Nodes`."""
    names = slurm_commands.hostnames(env)
    return Nodes(names, names[: len(names) - spares], least=least) if len(names) > spares else UNKNOWN


def is_lost(node: str, slurmd_port: int) -> bool:
    """Whether Slurm's daemon on a node can't be reached."""
    return not launch_env.listens(node, slurmd_port)


def resize(nodes: Nodes, env: Mapping[str, str]) -> str:
    """Make a job smaller, so that it outlives the end of a node that it gives back.

    Of a job that Slurm has just queued again, the same request would make the nodes required: it might never start.
    scontrol writes slurm_job_N_resize.* into the working directory: a folder of its own.

    Returns:
        Why Slurm refused; empty if it did not.
    """
    shown = slurm_commands.ask(["scontrol", "show", "job", env["SLURM_JOB_ID"]], env, with_stderr=True)
    if not shown.is_ok or "JobState=RUNNING" not in shown.words.split():
        return "the job no longer runs" if shown.is_ok else shown.words
    with tempfile.TemporaryDirectory(prefix="cluster_ddp-resize-") as folder:
        argv = ["scontrol", "update", f"JobId={env['SLURM_JOB_ID']}", f"NodeList={','.join(nodes.allocated)}"]
        answer = slurm_commands.ask(argv, env, with_stderr=True, folder=folder)
    return "" if answer.is_ok else answer.words


class Verdict(NamedTuple):
    """What follows."""

    then: str
    """What follows: one of `Then`."""
    why: str = ""
    """Why it ends, if --restarts asks for more; empty if it does not."""
    left_out: Mapping[str, Reason] = {}
    """Nodes that are left out from now on."""
    nodes: Nodes | None = None
    """Those of a restart; None if the nodes are not known, and stay."""


def after(
    now: Failed,
    before: Sequence[Failed],
    out: Mapping[str, Reason],
    restarts: int,
    nodes: Nodes,
    has_others: Callable[[Mapping[str, Reason]], bool],
) -> Verdict:
    """Return what follows a failure.

    Args:
        now, before: the failure, and earlier ones of this job.
        out: nodes that are lost or at fault.
        restarts: --restarts.
        nodes: of the allocation. If they are not known, all start again as they are.
        has_others: whether the cluster has nodes enough for the job if these are left out.
    """
    if not restarts:
        return Verdict(Then.END)
    if why := _no_more(now, before, restarts):
        return Verdict(Then.END, why)
    if not nodes.training:
        return Verdict(Then.RESTART)
    twice = _twice(now, before) if len(nodes.training) > 1 else {}
    for left_out in ({**twice, **out}, out):
        if (others := nodes.without(left_out)) is not None:
            return Verdict(Then.RESTART, left_out=left_out, nodes=others)
        if has_others(left_out):
            break
    return Verdict(Then.REQUEUE, left_out=left_out)


def _no_more(now: Failed, before: Sequence[Failed], restarts: int) -> str:
    """Why the job ends; empty if it does not."""
    failures = [*before, now]
    if len(failures) > restarts:
        times = {1: "once", 2: "twice"}.get(len(failures), f"{len(failures)} times")
        return f"failed {times} (--restarts {restarts})"
    newest = [one.checkpoint for one in failures[-_WITHOUT_PROGRESS:]]
    if now.checkpoint and newest == [now.checkpoint] * _WITHOUT_PROGRESS:
        return f"failed four times without a new checkpoint (the newest: {now.checkpoint})"
    for one in before:
        if not now.words or one.words != now.words or (one.checkpoint, one.step) != (now.checkpoint, now.step):
            continue
        if one.on_all_ranks and now.on_all_ranks:
            return f"all ranks failed twice with the same error: {now.words}"
        if now.step is not None and one.node != now.node:
            return f"the same error at step {now.step} on {one.node} and on {now.node}: {now.words}"
    return ""


def _twice(now: Failed, before: Sequence[Failed]) -> dict[str, Reason]:
    is_second = bool(now.node) and any(one.node == now.node and now.node not in one.without for one in before)
    why = Reason(f"A start failed first there twice; now: {now.words or 'without a word'}")
    return {now.node: why} if is_second else {}
