"""What several ranks must do, wherever they are: the tests that `pair` and `nodes` share.

A source in a docstring of this folder was read for what the test can't show: torch 2.15.0 as installed (for FSDP2
2.14.1), NCCL 2.30.7. "binary": disassembled. "near": C++ of torch's repository of August and September 2026. Nobody has
read torch 2.11, with which the tests ran. docs/explanation/gpu-paths.md says which ran. No test here shows:

- In torch 2.15, nccl2 is the default; its `getFuture` makes the compute stream wait for each bucket (binary;
  pytorch#192281): we set TORCH_DIST_USE_NCCL2=0.
- With `device_id`, NCCL waits for all ranks on sockets, without torch's limit (NCCL `misc/socket.cc`).
- NCCL refuses two ranks on one GPU, unless NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL `init.cc`, `env.rst`); between MIG
  instances: not verified.
- A process has the first MIG instance of CUDA_VISIBLE_DEVICES (MIG user guide, from memory; `_device_count_nvml`). On
  AMD, HIP_VISIBLE_DEVICES indexes what ROCR_VISIBLE_DEVICES leaves (`_parse_visible_devices`).
- A process group with `device_id` refuses tensors of other devices (binary): ranks with several GPUs pass none.
- With an old driver NVML still counts GPUs, and `set_device` fails (`cuda/__init__.py`).
- `get_device_properties` has a GPU's PCI address, the kernel the CPUs near it (`numa/binding.py`, sysfs-bus-pci).
- NVML's energy is of the whole GPU, in millijoules (`pynvml.py`); of a MIG instance: not verified.
- `GradScaler.step` reads the overflow by `.item()` unless the optimizer is fused (`amp/grad_scaler.py`);
  `sync_batchnorm` waits in each layer (`nn/modules/_functions.py`).
- Callbacks after a backward pass run in order (near: `engine.cpp`): two events time DDP's wait.
- HSDP's groups wait 30 minutes (`device_mesh.py`, `_init_one_process_group`): we set our limits.
"""

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
    """On all ranks, as the training itself finds in the end; with graphs as without.

    DDP's own first forward pass waits for rank 0's order of gradients (`_pre_forward`; near: `sync_bucket_indices`); we
    settle the buckets before. Who waits for whom under NCCL is not shown. `ncclCommDestroy` waits until no graph refers
    to the communicator (NCCL `init.cc`, `localPersistentRefs`): status 0 shows that ours are gone, not that it would
    hang.
    """
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
    """Ranks whose last batches have different sizes replay the same steps, and launch the same ones.

    Launches and replays may alternate if all ranks do the same (NCCL `usage/cudagraph.rst`, NCCL_GRAPH_MIXING_SUPPORT).
    """
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
    """In bfloat16; stopped by USR1 on the last rank. In float32 its gradients are those of DDP.

    `fully_shard` takes CUDA's current device (`_fsdp_init.py`, `_get_device_from_mesh`). `DTensor.to_local` returns the
    stored tensor; the optimizer writes on the current stream, which waited for the reductions (`_fsdp_param_group.py`,
    `finalize_backward`): so a save copies there, between two waits. Not shown: NCCL's order of adding; that `is_busy`
    sees a pending reduction. With offload, FSDP2 pins shards in the first forward pass (`_fsdp_param.py`,
    `reset_sharded_param`), and the host waits in C++ at the backward pass' end: if a peer hangs, only NCCL's watchdog
    ends it.
    """
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
    """Two runs of one command. NCCL's NVLS, which adds up in any order, must be off then.

    torch sets NCCL_ALGO=^NVLS if algorithms are deterministic while it creates the communicator (binary). Other nodes
    may add in another order: NCCL chooses by topology.
    """
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
    """The last rank raises it. It is printed once, the others name that rank, and all end before Slurm kills them.

    NCCL's kernels spin while they wait for an ended rank, and `ncclCommAbort` may wait for peers on the node (NCCL
    `init.cc`, `commDestroySync`): so it gets 5 s, then `os._exit`.
    """
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
    """SIGSTOP on the last rank: after the time limit the others name it and end.

    `.item()` and `synchronize()` block in C++, `Event.query` returns at once (binary): so we poll. Whether the wait was
    for the device or for gloo is open. NCCL's watchdog acts later, at twice the limit and some 60 s, and lists no
    captured collective (binary: `Watchdog::runLoop`; pytorch#103503, pytorch#196133). With
    TORCH_NCCL_RETHROW_CUDA_ERRORS=0 it only logs (near: `ProcessGroupNCCL.cpp`); the peer watch's `get_error` finds a
    broken communicator, which is not shown.
    """
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
