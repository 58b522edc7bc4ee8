"""What follows a failure: the ranks start again in the allocation, the job is requeued, or it ends. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cluster_ddp.agent.job.restart.history import Failed
from cluster_ddp.agent.job.restart.nodes import Nodes, Reason
from cluster_ddp.protocol import Then

_WITHOUT_PROGRESS = 4  # so many failures with the same newest checkpoint: three restarts were of no use


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
    nodes: Nodes | None,
    has_others: Callable[[Mapping[str, Reason]], bool],
) -> Verdict:
    """Return what follows a failure.

    Args:
        now: the failure.
        before: earlier ones of this job.
        out: nodes that are lost or at fault.
        restarts: --restarts.
        nodes: of the allocation; None if they are not known: then all start again as they are.
        has_others: whether the cluster has nodes enough for the job if these are left out.
    """
    if not restarts:
        return Verdict(Then.END)
    if why := _no_more(now, before, restarts):
        return Verdict(Then.END, why)
    if nodes is None:
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
        return f"failed {_times(len(failures))} (--restarts {restarts})"
    if [one.checkpoint for one in failures[-_WITHOUT_PROGRESS:]] == [now.checkpoint] * _WITHOUT_PROGRESS:
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


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
