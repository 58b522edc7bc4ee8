"""agent.job.restart.failures: what follows a failure, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from cluster_ddp.agent.job.restart import failures, job_nodes
from cluster_ddp.agent.job.restart.job_nodes import Nodes, Reason
from cluster_ddp.run import failure_kind
from cluster_ddp.run.journal import Failed
from cluster_ddp.run.names import Kind

TWO = Nodes(("n1", "n2"), ("n1", "n2"))
SPARE = Nodes(("n1", "n2", "n3"), ("n1", "n2"))
ERROR = "ValueError: x"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
CUDA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
TOO_LARGE = "the memory of a GPU is too small, and the next start would need as much"
END, RESTART, REQUEUE = ("end",), ("restart", ("n1", "n2")), ("requeue",)
LOST, SICK = {"n2": job_nodes.LOST}, {"n1": Reason("sick")}


def failed(node: str, words: str = "", **more: Any) -> Failed:
    return Failed(0.0, 0, node, 0, words, failure_kind.of_line(words), **more)


def at(step: int, node: str, **more: Any) -> Failed:
    return failed(node, step=step, **{"words": ERROR, **more})


def without_checkpoint(*names: str) -> list[Failed]:
    """Failures on one node after the other."""
    return [failed(f"m{number}", checkpoint=name) for number, name in enumerate(names)]


MEMORY = Failed(0.0, 0, "n1", 0, "killed by the kernel for memory", Kind.HOST_MEMORY)
ALL = failed("n1", ERROR, on_all_ranks=True)


class Case(NamedTuple):
    """A failure, those before it, and what follows: with which nodes, or why not."""

    follows: tuple[Any, ...]
    now: Failed
    before: Sequence[Failed] = ()
    out: Mapping[str, Reason] = {}
    nodes: Nodes = SPARE
    has_others: bool = False
    """How many nodes the cluster has for the job."""
    restarts: int = 9
    left_out: tuple[str, ...] = ()
    why: str = ""


CASES = {
    "not asked for": Case(END, failed("n1"), restarts=0),
    "the first failure": Case(RESTART, failed("n1", ERROR)),
    "nodes that are not known": Case(("restart",), failed("n1"), [failed("n1")], nodes=Nodes()),
    # How often.
    "the last restart": Case(RESTART, failed("n1"), [failed("n2")], restarts=2),
    "one more": Case(END, failed("n1"), [failed("n2")], restarts=1, why="failed twice (--restarts 1)"),
    "and a requeue is one, too": Case(
        END, failed("n1"), [failed("n3", then="requeue"), failed("n2")], restarts=2, why="failed 3 times (--restarts 2)"
    ),
    # Without progress.
    "three failures without a new checkpoint": Case(RESTART, failed("n1"), without_checkpoint("none", "none")),
    "four of which none is known": Case(RESTART, failed("n1", checkpoint=""), without_checkpoint("", "", "")),
    "four without": Case(
        END,
        failed("n1"),
        without_checkpoint("none", "none", "none"),
        why="failed four times without a new checkpoint (the newest: none)",
    ),
    "four, with progress": Case(RESTART, failed("n1", checkpoint="d"), without_checkpoint("a", "b", "c")),
    "not in a row": Case(RESTART, failed("n1", checkpoint="b"), without_checkpoint("b", "b", "b", "a")),
    # The user's error.
    "the same error at the same step elsewhere": Case(
        END, at(7, "n1"), [at(7, "n2")], why=f"the same error at step 7 on n2 and on n1: {ERROR}"
    ),
    "the same error at the same step there": Case(
        END, at(7, "n1"), [at(7, "n1")], why=f"the same error twice at step 7: {ERROR}"
    ),
    "one that is not the program's": Case(RESTART, at(7, "n1", words=CUDA), [at(7, "n1", words=CUDA)], nodes=TWO),
    "at another step": Case(RESTART, at(7, "n1"), [at(8, "n2")]),
    "from another checkpoint": Case(RESTART, at(7, "n1", checkpoint="b"), [at(7, "n2", checkpoint="a")]),
    "another error": Case(RESTART, at(7, "n1"), [at(7, "n2")._replace(words="another")]),
    "at a step that is not known": Case(RESTART, failed("n1", ERROR), [failed("n2", ERROR)]),
    "on all ranks": Case(END, ALL, [ALL], why=f"all ranks failed twice with the same error: {ERROR}"),
    "on all ranks once": Case(RESTART, ALL, [failed("n2", ERROR)]),
    "on all ranks without a word": Case(
        RESTART, failed("n1", on_all_ranks=True), [failed("n2", on_all_ranks=True)], nodes=TWO
    ),
    "but for its numbers": Case(
        END,
        at(7, "n1", words=f"{ERROR} 71.25"),
        [at(7, "n2", words=f"{ERROR} 8")],
        why=f"the same error at step 7 on n2 and on n1: {ERROR} 71.25",
    ),
    # Too large for a GPU.
    "once, before a checkpoint": Case(END, failed("n1", OOM), why=TOO_LARGE),
    "without a new checkpoint": Case(
        END, failed("n1", OOM, checkpoint="a"), [failed("n2", checkpoint="a")], why=TOO_LARGE
    ),
    "where no checkpoint is known": Case(END, failed("n1", OOM, checkpoint=""), why=TOO_LARGE),
    "after a checkpoint": Case(RESTART, failed("n1", OOM, checkpoint="b"), [failed("n1", OOM, checkpoint="a")]),
    "with smaller batches": Case(
        RESTART, failed("n1", OOM, micro_batch=1), [failed("n1", OOM, micro_batch=2)] * 4, restarts=1
    ),
    "with smaller batches, which counts later neither": Case(
        RESTART, failed("n1"), [failed("n1", OOM, micro_batch=2)] * 4, restarts=1
    ),
    # Killed for memory.
    "for memory, at once": Case(END, MEMORY, why=TOO_LARGE.replace("GPU", "node")),
    "for memory, after a checkpoint": Case(
        RESTART, MEMORY._replace(checkpoint="b"), [MEMORY._replace(checkpoint="a")], has_others=True
    ),
    "with more memory": Case(REQUEUE, MEMORY._replace(mem_mb=24000), [MEMORY._replace(mem_mb=16000)] * 4, restarts=1),
    "with more memory, without a lost node": Case(REQUEUE, MEMORY._replace(mem_mb=24000), out=LOST, left_out=("n2",)),
    # Suspended for minutes just before.
    "by a suspension": Case(RESTART, at(7, "n1", words=CUDA, suspended=True), [at(7, "n2", words=CUDA)], restarts=1),
    "by a suspension, which counts later neither": Case(
        RESTART, failed("n1"), [failed("n1", suspended=True)] * 3, restarts=1, has_others=True
    ),
    # Broken hardware.
    "at once": Case(("restart", ("n2", "n3")), at(7, "n1", words=ECC), left_out=("n1",)),
    "at once, without a spare": Case(REQUEUE, at(7, "n1", words=ECC), nodes=TWO, has_others=True, left_out=("n1",)),
    "at once, the only node": Case(
        ("restart", ("n2",)), at(7, "n1", words=ECC), nodes=Nodes(("n1", "n2"), ("n1",)), left_out=("n1",)
    ),
    "at once, without another node": Case(RESTART, at(7, "n1", words=ECC), nodes=TWO),
    # First twice on a node.
    "twice": Case(("restart", ("n2", "n3")), at(7, "n1", words=CUDA), [at(7, "n1", words=CUDA)], left_out=("n1",)),
    "twice the program's": Case(RESTART, at(8, "n1"), [at(7, "n1")], has_others=True),
    "twice, too large for its GPU": Case(
        RESTART, at(7, "n1", words=OOM, checkpoint="b"), [at(7, "n1", words=OOM, checkpoint="a")], has_others=True
    ),
    "once the program's": Case(RESTART, at(7, "n1", words=CUDA), [at(7, "n1")]),
    "the program's after another": Case(RESTART, at(7, "n1"), [at(6, "n1", words=CUDA)]),
    "twice, and once the program's": Case(
        ("restart", ("n2", "n3")), failed("n1"), [at(7, "n1"), failed("n1")], left_out=("n1",)
    ),
    "twice, without a spare": Case(REQUEUE, failed("n1"), [failed("n1")], nodes=TWO, has_others=True, left_out=("n1",)),
    "twice, without another node": Case(RESTART, failed("n1"), [failed("n1")], nodes=TWO),
    "on two nodes": Case(RESTART, failed("n1"), [failed("n2")]),
    "on the only node": Case(
        ("restart", ("n1",)), failed("n1"), [failed("n1")], nodes=Nodes(("n1", "n2"), ("n1",)), has_others=True
    ),
    "where it is not known": Case(RESTART, failed(""), [failed("")]),
    "since it was left out": Case(RESTART, failed("n1"), [failed("n1", without=("n1",))], has_others=True),
    # Lost, or found sick.
    "a spare takes over": Case(("restart", ("n1", "n3")), failed("n2"), out=LOST, left_out=("n2",)),
    "in the allocation's order": Case(("restart", ("n2", "n3")), failed("n2"), out=SICK, left_out=("n1",)),
    "no spare": Case(REQUEUE, failed("n2"), out=LOST, nodes=TWO, has_others=True, left_out=("n2",)),
    "no spare and no other": Case(REQUEUE, failed("n2"), out=LOST, nodes=TWO, left_out=("n2",)),
    "a range": Case(("restart", ("n1",)), failed("n2"), out=LOST, nodes=TWO._replace(least=1), left_out=("n2",)),
    "a range, and too few are left": Case(
        REQUEUE, failed("n2"), out=LOST, nodes=TWO._replace(least=2), has_others=True, left_out=("n2",)
    ),
    "too few spares": Case(REQUEUE, failed("n2"), out={**LOST, **SICK}, has_others=True, left_out=("n1", "n2")),
    "the spare itself": Case(RESTART, failed("n2"), out={"n3": Reason("sick")}, left_out=("n3",)),
    "one lost, twice on another": Case(
        REQUEUE, failed("n1"), [failed("n1")], out=LOST, has_others=True, left_out=("n1", "n2")
    ),
    "one lost, twice on another, no other": Case(
        ("restart", ("n1", "n3")), failed("n1"), [failed("n1")], out=LOST, left_out=("n2",)
    ),
    "left out before": Case(
        REQUEUE, failed("n2"), out=LOST, nodes=SPARE._replace(left_out={"n3": Reason("sick")}), left_out=("n2",)
    ),
}


@pytest.mark.fault(
    "an exception of the program (such as ValueError) repeats; with `--restarts` and spares",
    "no node is left out and no spare used; the second time at the same step from the same checkpoint ends the job, "
    "or four starts without a new checkpoint",
    bound="seconds",
)
@pytest.mark.parametrize("name", CASES)
def test_what_follows(name: str) -> None:
    one = CASES[name]
    found = failures.what_follows(one.now, one.before, one.out, one.restarts, one.nodes, lambda out: one.has_others)
    training = () if found.nodes is None else (found.nodes.training,)
    assert ((found.then, *training), found.why) == (one.follows, one.why)
    assert sorted(found.left_out) == sorted(one.left_out)
    if found.nodes is not None:
        assert found.left_out.keys() <= found.nodes.left_out.keys()
    if set(one.left_out) <= set(one.out):  # else it is the second failure that is at fault
        assert found.left_out == {node: one.out[node] for node in one.left_out}


@pytest.mark.parametrize(
    ("samples", "most", "smaller"),
    [
        *((16, None, 8), (13, None, 7), (2, None, 1), (1, None, None), (None, None, None), (None, 8, None)),
        *((8, 8, 4), (7, 8, 4), (2, 2, 1)),
        *((2, 1, None), (13, 7, None)),  # each rank needs a sample in each batch: some have more than asked
    ],
)
def test_batches_are_halved_until_that_makes_no_smaller_ones(
    samples: int | None, most: int | None, smaller: int | None
) -> None:
    assert failures.smaller_micro_batch(samples, most) == smaller


@pytest.mark.parametrize(
    ("had_mb", "most_mb", "before", "more"),
    [
        *((16000, 64000, (), 24000), (16000, 20000, (), 20000), (16000, 16000, (), None)),
        *((24000, 64000, (None, 24000), 36000), (16000, 64000, (24000, None), None)),  # Slurm may have refused it
    ],
)
def test_memory_grows_by_half_up_to_what_was_asked_for(
    had_mb: int, most_mb: int, before: Sequence[int | None], more: int | None
) -> None:
    assert failures.more_memory(had_mb, most_mb, [MEMORY._replace(mem_mb=one) for one in before]) == more
