"""The group `gpu_nodes`: two nodes with eight GPUs each, through srun. `make test-gpu-nodes`, or

python tests/gpu/run.py gpu_nodes --srun="--partition=gpu --account=ABC"     on a login node
python tests/gpu/run.py gpu_nodes                                            inside an allocation
"""

from __future__ import annotations

import statistics

import overlap
import several
from lab import Lab
from table import Test, both, each


def communication_overlaps_backward(lab: Lab) -> None:
    """NCCL's kernels run beside those of the backward pass, which DDP is for; with nccl2 not (see several)."""
    trace = lab.new_folder().with_suffix(".json")
    lab.trained(options={"trace": str(trace)}, epochs=2, batch_size=16)
    nccl, others = overlap.kernels(trace)
    if lab.on_gpu("kernels in a profile"):
        assert nccl and others, f"{len(nccl)} kernels of NCCL, {len(others)} others"
        beside_us = overlap.shared(nccl, others)
        assert beside_us > 0, f"none of {overlap.length(nccl):.0f} µs"
        percent = 100 * beside_us / overlap.length(nccl)
        lab.figure(f"{lab.world_size} ranks: NCCL's time beside other kernels", percent, unit="% of it")


def costs_are_noted(lab: Lab) -> None:
    """What agreeing on a stop, saving and resuming take on rank 0."""
    folder = lab.new_folder()
    config = {"batch_size": 16, "checkpoint_every": "50steps" if lab.rehearse else "200steps"}
    stop = {"fault": {"rank": lab.last_rank, "step": 30, "do": "USR1"}}
    stopped = lab.train(folder=folder, options=stop, epochs=200, **config)
    assert set(stopped.statuses) == {75}, f"exit statuses {stopped.statuses}:\n{stopped.text}"
    resumed = lab.train(folder=folder, options={"timed": True}, epochs=lab.epochs(400), **config)
    assert set(resumed.statuses) == {0}, f"exit statuses {resumed.statuses}:\n{resumed.text}"
    seconds = resumed.script_result["seconds"]
    assert len(seconds["load_into"]) == 1 and seconds["save"], seconds
    agreeing_s = sum(seconds["step"]) - sum(seconds["save"])
    percent = 100 * agreeing_s / sum(seconds["train"])
    if not lab.rehearse:
        ranks = f"{lab.world_size} ranks"
        lab.figure(f"{ranks}: from USR1 on one to the end of all, saved", stopped.after_fault_s, unit="s")
        lab.figure(f"{ranks}: agreeing on a stop", percent, unit="% of the time")
        lab.figure(f"{ranks}: a save", statistics.median(seconds["save"]) * 1000, unit="ms")
        lab.figure(f"{ranks}: resuming", seconds["load_into"][0], unit="s")


TESTS: dict[str, Test] = {
    **each("weights_are_equal", several.weights_are_equal, "recipe", ("reference",)),
    **each("last_batches_may_be_mixed", several.last_batches_may_be_mixed, "rest", ("one", "half")),
    "communication_overlaps_backward": communication_overlaps_backward,
    "deterministic_means_the_same_bits": several.deterministic_means_the_same_bits,
    **both("a_stopped_training_resumes_to_the_bit", several.a_stopped_training_resumes_to_the_bit),
    **each(
        "a_sharded_training_resumes_to_the_bit", several.a_sharded_training_resumes_to_the_bit, "strategy", ("hsdp",)
    ),
    "costs_are_noted": costs_are_noted,
    **both("a_warning_stops_all", several.a_warning_stops_all),
    **both("an_exception_ends_all", several.an_exception_ends_all),
    **both("a_kill_ends_all", several.a_kill_ends_all),
    **both("one_that_hangs_is_named", several.one_that_hangs_is_named),
    "a_rank_without_gpu_is_refused": several.a_rank_without_gpu_is_refused,
}
