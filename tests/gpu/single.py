"""The group `gpu`: one process, one GPU. `make test-gpu`, or `python tests/gpu/run.py gpu`."""

from __future__ import annotations

import functools
import json
import statistics
import sys
from typing import Any

import several
from lab import KILL_WAIT_S, Lab, difference
from processes import python
from table import Test, both, each

# Of the loss, absolute: in the first ten steps, and in those in which it falls. float32 on two devices differs in the
# last bits only; bf16 keeps 8 of them.
_TOLERANCES = {"reference": (1e-3, 0.02), "fast": (0.05, 0.3)}
_RECIPES: dict[str, dict[str, Any]] = {
    "reference": {"recipe": "reference", "lr": 0.05},  # with 0.1, the last bit became a tenth of the loss
    "fast": {"recipe": "fast", "lr": 0.001},
}
# Powers of two: then it is the same number in float32, which a graph has it in, and in float64.
_EXACT: dict[str, Any] = {"recipe": "reference", "lr": 0.5, "gamma": 0.5}


def _whole(lab: Lab) -> dict[str, Any]:
    return {"deterministic": True, "epochs": lab.epochs(4)}


def losses_match_the_cpu(lab: Lab, recipe: str) -> None:
    """The same training without dropout, whose random numbers are each device's own.

    Whether TF32, which `cudnn.allow_tf32 = False` turns off (`backends/cudnn`), would fail it was not tried.
    """
    config = {**_RECIPES[recipe], "epochs": 1, "batch_size": 32, "log_interval": 1}
    options = {"dropout": False}
    on_gpu, on_cpu = lab.trained(options=options, **config), lab.trained(options=options, cuda=False, **config)
    at_first, later = _TOLERANCES[recipe]
    differences = [abs(one - other) for one, other in zip(on_gpu.losses, on_cpu.losses, strict=True)]
    assert len(differences) == 45 and on_gpu.losses[-1] < on_gpu.losses[0] / 2, on_gpu.losses
    assert max(differences[:10]) < at_first, differences
    assert max(differences) < later, differences
    lab.on_gpu("the losses of two devices")


def graphs_equal_eager(lab: Lab, recipe: str) -> None:
    """What is captured does what it would do uncaptured: with dropout, and a last batch of 29 instead of 64.

    DDP's gradient nodes remember their stream: one side stream serves model, warm-up and capture (`cuda/graphs.py`). A
    capture freezes numbers: hence `capturable` and a tensor as learning rate (`optim/optimizer.py`).
    """
    config = {"recipe": recipe, "batch_size": 64, "cuda_graph": True, **_whole(lab)}
    graphed, eager = lab.trained(**config), lab.trained(options={"capture": False}, **config)
    assert graphed.weights == eager.weights, difference(graphed, eager)
    lab.on_gpu("capture and replay of a CUDA graph")


def graphs_equal_the_plain_step(lab: Lab) -> None:
    """The option changes no bit, where the learning rate is the same number in float32."""
    graphed, plain = lab.trained(cuda_graph=True, **_EXACT, **_whole(lab)), lab.trained(**_EXACT, **_whole(lab))
    assert graphed.weights == plain.weights, difference(graphed, plain)
    lab.on_gpu("capture and replay of a CUDA graph")
    if not lab.rehearse:
        lab.figure("the digits, batch 64, eager", plain.samples_per_s, unit="samples/s")
        ratio = graphed.samples_per_s / plain.samples_per_s
        what = "the digits, batch 64, --cuda-graph"
        lab.figure(what, graphed.samples_per_s, unit="samples/s", ratios=[ratio], peer="eager")


def graphs_resume_as_they_were(lab: Lab) -> None:
    """Stopped in the middle of the second epoch, after the capture, and resumed: the same bits as without a stop."""
    config = {"cuda_graph": True, **_EXACT, **_whole(lab)}
    whole, folder = lab.trained(**config), lab.new_folder()
    stopped = lab.train(folder=folder, options={"fault": {"rank": 0, "step": 30, "do": "USR1"}}, **config)
    assert stopped.statuses == [75], f"exit statuses {stopped.statuses}:\n{stopped.text}"
    resumed = lab.train(folder=folder, **config)
    assert resumed.statuses == [0] and "step-000000" in resumed.text, resumed.text
    assert resumed.weights == whole.weights, difference(resumed, whole)


def nothing_waits_between_log_lines(lab: Lab, *, cuda_graph: bool) -> None:
    """`torch.cuda.set_sync_debug_mode("error")` from the 14th step of each epoch to its next log line.

    The mode does not cover torch.distributed. DDP waits for its own times in ten steps and each hundredth (binary:
    `should_collect_runtime_stats`): the sampling rate puts that off.
    """
    config = {"epochs": 3, "batch_size": 32, "log_interval": 1000, "cuda_graph": cuda_graph}  # over DDP's 100th step
    run = lab.trained(options={"watch_syncs": True}, **config)
    assert run.script_result["watched_steps"] == 3 * (45 - 14), run.script_result
    assert run.script_result["notices"], "the mode lets .item() through: nothing was shown"
    lab.on_gpu("the mode itself")


def a_copy_in_host_memory(lab: Lab) -> None:
    """2 GB: equal, pinned, in no more memory than it needs, and faster than torch's own copy.

    torch rounds pinned blocks up to powers of two (`CachingHostAllocator.h`); `cudaHostRegister` pins one piece. A
    failed registration leaves an error for the next kernel; not shown.
    """
    folder = lab.new_folder()
    path = folder / "result.json"
    ended = lab.start(folder, python("host_copy.py", "20" if lab.rehearse else "2000", str(path)))
    assert ended.statuses == [0], ended.outputs[0]
    result = json.loads(path.read_text())
    size = result["bytes"]
    assert result["is_equal"]
    assert size <= result["memory_bytes"] < size + 4096, result
    if lab.on_gpu("pinned memory, and the time of a copy from the GPU"):
        assert result["is_pinned"]
        ours_s, pageable_s = map(statistics.median, (result["ours_s"], result["pageable_s"]))
        assert ours_s < pageable_s, result
        ratios = [one / pageable_s for one in result["ours_s"]]
        what = f"a checkpoint's copy of {size / 1e9:.1f} GB in host memory"
        lab.figure(what, *result["ours_s"], unit="s", ratios=ratios, peer="torch's own, pageable")
        lab.figure(f"{what}: pinned", result["memory_bytes"], unit="bytes")


def resident_equals_loader(lab: Lab) -> None:
    """Batches made on the GPU are those of the loader: plain ones to the bit.

    Of the digits the labels are; CUDA divides by a number with its reciprocal, which costs the last bit of a pixel
    (`BinaryDivTrueKernel.cu`). No test forces memory to be reused early, which `record_stream` delays.
    """
    folder = lab.new_folder()
    path = folder / "result.json"
    ended = lab.start(folder, python("batches.py", str(path)))
    assert ended.statuses == [0], ended.outputs[0]
    result = json.loads(path.read_text())
    assert result["plain"] == [0.0, 0.0], result
    assert result["normalised"][0] <= 1e-6 and result["normalised"][1] == 0.0, result
    assert lab.rehearse or result["on_device"] == "cuda", result
    lab.on_gpu("batches made on the GPU")


def trains_through_a_loader(lab: Lab) -> None:
    """Worker processes, and pinned batches, beside the capture of a graph.

    With "global" capture, calls of the pinning thread would break it (`cuda/graphs.py`; which calls: not verified).
    """
    config = {"epochs": 2, "cuda_graph": True, "deterministic": True}
    run = lab.trained(options={"loader": True}, **config)
    assert run.losses[-1] < run.losses[0] / 2, run.losses


def a_warning_stops_it(lab: Lab, *, cuda_graph: bool) -> None:
    """USR1: saved, and exit status 75."""
    config = {"epochs": 200, "cuda_graph": cuda_graph}
    run = lab.train(options={"fault": {"rank": 0, "step": 30, "do": "USR1"}}, **config)
    assert run.statuses == [75], f"exit statuses {run.statuses}:\n{run.text}"
    assert list((run.folder / "checkpoints").glob("step-*.pt")), run.text
    lab.is_gone_within(KILL_WAIT_S, run)
    if not lab.rehearse:
        graph = ", --cuda-graph" if cuda_graph else ""
        lab.figure(f"one process{graph}: from USR1 to its end", run.after_fault_s, unit="s")


def the_fork_launcher_trains_the_same(lab: Lab) -> None:
    """A rank that was forked after torch's import uses the GPU, and ends with the same weights.

    `is_available()` starts CUDA, which fails after a fork, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 (`cuda/__init__.py`).
    """
    launcher = ("-m", "cluster_ddp", "launch", "--ranks", "1", "--launcher", "fork", "--", sys.executable)
    forked = lab.train(launcher=launcher, **_EXACT, **_whole(lab))
    assert forked.statuses == [0], f"exit statuses {forked.statuses}:\n{forked.text}"
    plain = lab.trained(**_EXACT, **_whole(lab))
    assert forked.weights == plain.weights, difference(forked, plain)
    assert lab.rehearse or forked.script_result["about"]["device"] != "CPU"
    lab.on_gpu("CUDA in a forked process")


def deterministic_means_the_same_bits(lab: Lab, recipe: str) -> None:
    """Two runs of one command."""
    config = {"recipe": recipe, "epochs": 2, "deterministic": True}
    first, second = (lab.train(**config) for _ in range(2))
    assert (first.statuses, second.statuses) == ([0], [0]), first.text + second.text
    assert first.weights == second.weights, difference(first, second)
    lab.on_gpu("cuDNN's and cuBLAS' choices")


def a_failure_is_reported_once(lab: Lab, fault: str, words: str, *, cuda_graph: bool) -> None:
    """One traceback, with rank and host, and the process ends.

    After a device assert every CUDA call fails (CUDA, sticky errors); what an abort does then is not verified. Whether
    NCCL's watchdog saw the error on one rank is open.
    """
    run = lab.train(options={"fault": {"rank": 0, "step": 30, "do": fault}}, epochs=50, cuda_graph=cuda_graph)
    assert run.statuses[0] not in (0, 75, None), f"exit statuses {run.statuses}:\n{run.text}"
    assert run.text.count("Traceback (most recent call last)") == 1, run.text
    assert run.text.count("[rank 0 ") == 1, run.text
    lab.is_gone_within(KILL_WAIT_S, run)
    if lab.on_gpu("CUDA's own error"):
        assert words in run.text, run.text


_sharded = functools.partial(several.a_sharded_training_resumes_to_the_bit, strategy="fsdp")

TESTS: dict[str, Test] = {
    **each("losses_match_the_cpu", losses_match_the_cpu, "recipe", _RECIPES),
    **each("graphs_equal_eager", graphs_equal_eager, "recipe", _RECIPES),
    "graphs_equal_the_plain_step": graphs_equal_the_plain_step,
    "graphs_resume_as_they_were": graphs_resume_as_they_were,
    "a_sharded_training_resumes_to_the_bit": _sharded,
    "a_sharded_training_resumes_to_the_bit-offload": functools.partial(_sharded, offload=True),
    **both("nothing_waits_between_log_lines", nothing_waits_between_log_lines),
    "a_copy_in_host_memory": a_copy_in_host_memory,
    "resident_equals_loader": resident_equals_loader,
    "trains_through_a_loader": trains_through_a_loader,
    **both("a_warning_stops_it", a_warning_stops_it),
    "the_fork_launcher_trains_the_same": the_fork_launcher_trains_the_same,
    **each("deterministic_means_the_same_bits", deterministic_means_the_same_bits, "recipe", _RECIPES),
    **both("out_of_memory_is_reported_once", a_failure_is_reported_once, fault="memory", words="out of memory"),
    **both("a_device_assert_is_reported_once", a_failure_is_reported_once, fault="assert", words="device-side assert"),
}
