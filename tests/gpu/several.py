"""What several ranks must do, wherever they are: the tests that `pair` and `nodes` share."""

from __future__ import annotations

import json
import re
from typing import Any

from lab import KILL_WAIT_S, Lab, Run, difference
from processes import python

_TIMEOUT_S = 10.0  # how long a rank may let the others wait, where one is to hang
# Of samples in the last global batch of nine: one, which joins the batch before; half; all but one.
RESTS = ("one", "half", "all but one")
_BATCH = 8
_GLOBAL_BATCH = 64  # 23 steps an epoch, the last one smaller: graphs are captured in the first


def weights_are_equal(lab: Lab, *, recipe: str) -> None:
    """On all ranks, as the training itself finds in the end; with graphs as without."""
    batch_size = _GLOBAL_BATCH // lab.world_size
    config = {
        "recipe": recipe,
        "batch_size": batch_size,
        "epochs": lab.epochs(4),
        "deterministic": True,
        "cuda_graph": True,
    }
    graphed, eager = lab.trained(**config), lab.trained(options={"capture": False}, **config)
    assert graphed.weights == eager.weights, difference(graphed, eager)
    assert graphed.losses[-1] < graphed.losses[0] / 2, graphed.losses
    if lab.on_gpu("NCCL, and its collectives in CUDA graphs"):
        ranks = f"{lab.world_size} ranks{' on one GPU' if lab.shares_gpu else ''}, {recipe}, batch {batch_size}"
        lab.figure(f"{ranks}, eager", eager.samples_per_s, unit="samples/s")
        ratio = graphed.samples_per_s / eager.samples_per_s
        lab.figure(f"{ranks}, --cuda-graph", graphed.samples_per_s, unit="samples/s", ratios=[ratio], peer="eager")


def last_batches_may_be_mixed(lab: Lab, *, rest: str) -> None:
    """Ranks whose last batches have different sizes replay the same steps, and launch the same ones."""
    global_batch = _BATCH * lab.world_size
    left = {"one": 1, "half": global_batch // 2 - 1, "all but one": global_batch - 1}[rest]
    config = {"batch_size": _BATCH, "epochs": lab.epochs(3), "deterministic": True, "lr": 0.1, "cuda_graph": True}
    cut = {"samples": 8 * global_batch + left}
    graphed, eager = lab.trained(options=cut, **config), lab.trained(options={**cut, "capture": False}, **config)
    assert graphed.weights == eager.weights, difference(graphed, eager)


def a_stopped_training_resumes_to_the_bit(lab: Lab, *, cuda_graph: bool) -> None:
    """USR1 on the last rank in the second epoch, and resumed: the same weights as without a stop."""
    rates = {"lr": 0.5, "gamma": 0.5}  # the same numbers in float32, which a graph has them in
    batch_size = _GLOBAL_BATCH // lab.world_size
    config = {"deterministic": True, "epochs": 12, "batch_size": batch_size, "cuda_graph": cuda_graph, **rates}
    whole, folder = lab.trained(**config), lab.new_folder()
    stop = {"fault": {"rank": lab.last_rank, "step": 30, "do": "USR1"}}
    stopped = lab.train(folder=folder, options=stop, **config)
    assert set(stopped.statuses) == {75}, f"exit statuses {stopped.statuses}:\n{stopped.text}"
    resumed = lab.train(folder=folder, **config)
    assert set(resumed.statuses) == {0} and "step-000000" in resumed.text, resumed.text
    assert resumed.weights == whole.weights, difference(resumed, whole)


def a_sharded_training_resumes_to_the_bit(lab: Lab, *, strategy: str, offload: bool = False) -> None:
    """In bfloat16; stopped by USR1 on the last rank. In float32 its gradients are those of DDP."""
    folder = lab.new_folder()
    folder.mkdir()
    task = {"rehearse": lab.rehearse, "shared_gpu": lab.shares_gpu, "strategy": strategy, "offload": offload}
    (folder / "task.json").write_text(json.dumps({**task, "run_dir": str(folder)}))
    results = []
    for status in (75, 0):
        ended = lab.start(folder, python("sharded.py", str(folder / "task.json")))
        assert set(ended.statuses) == {status}, f"exit statuses {ended.statuses}:\n" + "\n".join(ended.outputs)
        results.append(json.loads((folder / "result.json").read_text()))
    stopped, resumed = results
    of_ddp, of_shards = stopped["norms"]
    assert len(of_ddp) == 6, of_ddp
    assert all(abs(one - other) < 1e-3 * one for one, other in zip(of_ddp, of_shards, strict=True)), stopped["norms"]
    assert 5 <= resumed["resumed_at"] < 40, resumed
    assert resumed["resumed"] == stopped["whole"], (stopped, resumed)
    if lab.on_gpu("a copy of pieces in pinned memory"):
        assert resumed["is_pinned"], resumed


def deterministic_means_the_same_bits(lab: Lab) -> None:
    """Two runs of one command. NCCL's NVLS, which adds up in any order, must be off then."""
    config = {"deterministic": True, "epochs": 2, "batch_size": 32}
    first, second = (lab.train(**config) for _ in range(2))
    assert (set(first.statuses), set(second.statuses)) == ({0}, {0}), first.text + second.text
    assert first.weights == second.weights, difference(first, second)
    if lab.on_gpu("NCCL's choice of algorithm"):
        algorithms = first.script_result["deterministic"]["NCCL_ALGO"]
        assert algorithms, "torch has not kept NCCL from NVLS (NCCL_ALGO)"


def a_warning_stops_all(lab: Lab, *, cuda_graph: bool) -> None:
    """USR1 on the last rank: all save and end with status 75."""
    run = _with_fault(lab, "USR1", cuda_graph=cuda_graph)
    assert set(run.statuses) == {75}, f"exit statuses {run.statuses}:\n{run.text}"
    assert list((run.folder / "checkpoints").glob("step-*.pt")), run.text
    _figure(lab, run, "USR1 on one to the end of all", cuda_graph)


def an_exception_ends_all(lab: Lab, *, cuda_graph: bool) -> None:
    """Of the last rank: it is told once, the others point to it, and all are gone before Slurm would kill them."""
    run = _with_fault(lab, "raise", cuda_graph=cuda_graph)
    _all_failed(run)
    assert run.text.count("RuntimeError: injected by the test") == 1, run.text
    assert run.text.count("Traceback (most recent call last)") == 1, run.text
    assert f"stopped: rank {lab.last_rank} on " in run.text or lab.srun is not None, run.text
    lab.is_gone_within(KILL_WAIT_S, run)
    _figure(lab, run, "an exception on one to the end of all", cuda_graph)


def a_kill_ends_all(lab: Lab, *, cuda_graph: bool) -> None:
    """kill -9 on the last rank, which can say nothing: srun ends the others, that wait in kernels, after KillWait."""
    run = _with_fault(lab, "KILL", cuda_graph=cuda_graph)
    _all_failed(run)
    lab.is_gone_within(KILL_WAIT_S + 20, run)
    _figure(lab, run, "kill -9 on one to the end of all", cuda_graph)


def one_that_hangs_is_named(lab: Lab, *, cuda_graph: bool) -> None:
    """SIGSTOP on the last rank: after the time limit the others name it and end."""
    config = {"cuda_graph": cuda_graph, "collective_timeout_s": _TIMEOUT_S}
    run = _with_fault(lab, "STOP", hangs=(lab.last_rank,), **config)
    others = run.statuses if lab.srun is not None else run.statuses[: lab.last_rank]
    assert all(status not in (0, 75, None) for status in others), f"exit statuses {run.statuses}:\n{run.text}"
    named = re.findall(r"rank (\d+) on \S+ (?:did not answer|does not answer|is stopped)", run.text)
    assert set(named) == {str(lab.last_rank)}, run.text
    if lab.srun is None:  # Slurm kills the one that is stopped after KillWait only
        lab.is_gone_within(_TIMEOUT_S + KILL_WAIT_S, run)


def a_rank_without_gpu_is_refused(lab: Lab) -> None:
    """The last one sees none: an error with its number and its node, instead of a wait."""
    run = lab.train(options={"hide_gpu": lab.last_rank}, epochs=1, rendezvous_timeout_s=60)
    assert 0 not in run.statuses, f"exit statuses {run.statuses}:\n{run.text}"
    assert "Traceback" not in run.text, run.text
    if lab.srun is not None:  # there that rank knows what Slurm gave, and need not meet the others
        assert f"[rank {lab.last_rank} " in run.text and "sees none" in run.text, run.text
    else:
        refused = f"Training on {lab.world_size} ranks together:"
        assert refused in run.text and f"rank {lab.last_rank} on " in run.text and ": cpu" in run.text, run.text
    lab.on_gpu("ranks that have one")


def _with_fault(lab: Lab, fault: str, **more: Any) -> Run:
    """A training in whose second epoch something happens to the last rank."""
    config = {"epochs": 200, "batch_size": _GLOBAL_BATCH // lab.world_size, **more}
    return lab.train(options={"fault": {"rank": lab.last_rank, "step": 30, "do": fault}}, **config)


def _all_failed(run: Run) -> None:
    assert all(status not in (0, 75, None) for status in run.statuses), f"exit statuses {run.statuses}:\n{run.text}"


def _figure(lab: Lab, run: Run, what: str, cuda_graph: bool) -> None:
    graph = ", --cuda-graph" if cuda_graph else ""
    if not lab.rehearse:
        lab.figure(f"{lab.world_size} ranks{graph}: from {what}", run.after_fault_s, unit="s")
