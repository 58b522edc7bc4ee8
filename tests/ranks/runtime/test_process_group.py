"""Joining and leaving the process group on a GPU, with stand-ins for the device, its graphs and NCCL's calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import slurm_step
from torch._C._distributed_c10d import ErrorType

import cluster_ddp
from cluster_ddp.errors import CommunicatorError, DeviceError
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.runtime.device.interruptible_wait import DeviceTimeoutError
from cluster_ddp.runtime.failure import error_report
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology

GPU = torch.device("cuda", 0)


class Calls(list[str]):
    """What was called, in order."""


class Backend:
    """Stands in for NCCL's."""

    timeout: timedelta | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    calls = Calls()
    monkeypatch.setattr(process_group, "_ABORT_S", 0.2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    yield calls


def test_on_a_gpu_nccl_waits_twice_as_long_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog ends the process without naming who hangs; and its variable is there before torch reads it."""
    backend, seen = Backend(), {}

    def init_process_group(**options: Any) -> None:
        seen.update(options, variable=os.environ["TORCH_DIST_USE_NCCL2"])

    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend={GPU: backend}.__getitem__))
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "group", group)
    topology = Topology.from_environ(slurm_step(1, 2, job_id=1))
    process_group.join(topology, GPU, dist.HashStore(), timeout_s=30)
    assert (seen["timeout"], backend.timeout) == (timedelta(seconds=30), timedelta(seconds=60))
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert (seen["backend"], seen["device_id"], seen["variable"]) == ("cpu:gloo,cuda:nccl", GPU, "0")


def test_a_users_own_choice_of_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_DIST_USE_NCCL2": "1"})
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda _: Backend())))
    process_group.join(Topology.from_environ(slurm_step(0, 2, job_id=1)), GPU, dist.HashStore(), timeout_s=30)
    assert os.environ["TORCH_DIST_USE_NCCL2"] == "1"


def test_a_backend_that_torch_has_wrapped_gets_its_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, with gloo in NCCL's place: the wrapper has no _set_default_timeout."""
    before, init = dist.get_debug_level(), dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda **o: init(**{**o, "backend": "gloo", "device_id": None}))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        process_group.join(Topology.from_environ({}), GPU, dist.HashStore(), timeout_s=30)
        assert dist.group.WORLD is not None
        wrapper = dist.group.WORLD._get_backend(GPU)
        assert type(wrapper) is not type(wrapper.wrapped_pg) and not hasattr(wrapper, "_set_default_timeout")
        assert wrapper.wrapped_pg.options._timeout == timedelta(seconds=60)
        assert process_group.communicator_error(GPU) is None
        process_group.barrier()
    finally:
        dist.set_debug_level(before)
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    "told",
    [
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000",
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1",
    ],
)
def test_two_ranks_with_one_gpu_are_refused_in_our_words(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """NCCL sees it, where nothing says how many GPUs the node has."""
    words = f"ncclInvalidUsage\nLast error:\n{told}"

    def init_process_group(**_: Any) -> None:
        raise dist.DistBackendError(words)

    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0"})
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(DeviceError, match=rf"(?s)DEVICES=0\): {told}.*Hint: a GPU"):
        process_group.join(Topology.from_environ(slurm_step(1, 2, job_id=1)), GPU, dist.HashStore(), timeout_s=30)
    words = "unhandled system error"
    with pytest.raises(dist.DistBackendError, match="unhandled system error"):
        process_group.join(Topology.from_environ(slurm_step(1, 2, job_id=1)), GPU, dist.HashStore(), timeout_s=30)


@pytest.mark.parametrize(("told", "kind"), [("TIMEOUT", DeviceTimeoutError), ("COMM_ERROR", CommunicatorError)])
def test_what_nccls_watchdog_has_found_is_told(
    monkeypatch: pytest.MonkeyPatch, told: str, kind: type[Exception]
) -> None:
    """A time limit names the rank that hangs, as our own does; for anything else, a rank may be gone."""
    backend = SimpleNamespace(get_error=lambda: getattr(ErrorType, told))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda _: backend)))
    found = process_group.communicator_error(GPU)
    assert type(found) is kind and (error_report._is_timeout(found), error_report._is_lost(found)) == (
        kind is DeviceTimeoutError,
        kind is CommunicatorError,
    )
    assert process_group.communicator_error(torch.device("cpu")) is None


def test_graphs_are_gone_before_the_communicator_is(calls: Calls, said: pytest.LogCaptureFixture) -> None:
    process_group.before_leaving.append(lambda: calls.append("graphs reset"))
    process_group.before_leaving.append(lambda: 1 / 0)  # a fault of the training's does not change its end
    process_group.leave()
    assert calls == ["graphs reset", "destroyed"]
    assert "ZeroDivisionError" in said.text


@pytest.mark.parametrize("error", [None, RuntimeError("CUDA error: device-side assert triggered")])
def test_an_abort_that_fails_is_not_over(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Python's own way out would go through CUDA's and NCCL's destructors."""

    def abort() -> None:
        calls.append("aborted")
        if error is not None:
            raise error

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    assert process_group.abort(GPU) == (error is None)
    assert calls == ["aborted"]


def test_an_abort_that_never_ends_is_given_up(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """ncclCommAbort, as long as a graph is alive."""
    release = threading.Event()
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", release.wait)
    assert not process_group.abort(GPU)
    release.set()


def test_on_a_cpu_the_group_is_destroyed_either_way(calls: Calls) -> None:
    process_group.leave()
    assert process_group.abort(torch.device("cpu"))
    assert calls == ["destroyed", "destroyed"]


def test_the_barrier_is_on_the_cpu_whatever_the_ranks_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own would be NCCL's where the group has a device, and block in it."""
    devices: list[torch.device] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: devices.append(tensor.device))
    monkeypatch.setattr(dist, "barrier", lambda *_, **__: pytest.fail("torch's own"))
    monkeypatch.setattr(interruptible_wait, "for_device", lambda device, **_: devices.append(device))
    World(topology=Topology.from_environ({}), device=GPU).barrier()
    assert devices == [GPU, torch.device("cpu")]


def test_what_must_be_decided_before_the_communicator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks at determinism once, while it makes NCCL's (NCCL_ALGO=^NVLS)."""
    seen: list[tuple[bool, bool]] = []
    join = process_group.join

    def joined(*arguments: Any, **options: Any) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ))
        join(*arguments, **options)

    monkeypatch.setattr(process_group, "join", joined)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        with cluster_ddp.distributed(cuda=False, deterministic=True):
            pass
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert seen == [(True, True)]
