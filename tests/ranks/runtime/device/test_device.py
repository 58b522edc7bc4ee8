"""Which GPU a rank takes: pure functions, so no GPU is needed to test them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster_ddp.errors import DeviceError
from cluster_ddp.runtime.device import binding, device
from cluster_ddp.slurm.topology import Topology


def topology(**fields: Any) -> Topology:
    defaults: dict[str, Any] = {
        "launcher": "slurm",
        "rank": 1,
        "local_rank": 1,
        "world_size": 2,
        "local_world_size": 2,
        "master_addr": "h",
        "port_candidates": (1,),
    }
    return Topology(**(defaults | fields))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "visible", "expected"),
    [
        ({}, 0, "cpu"),
        ({}, 2, "cuda:1"),
        ({"gpus_on_node": 2}, 2, "cuda:1"),
        # --gpus-per-task=1: SLURM_GPUS_ON_NODE counts the node's, each task sees its own only.
        ({"gpus_on_node": 2}, 1, "cuda:0"),
        ({}, 1, "cuda:0"),  # as with a container for each rank; without SLURM_GPUS_ON_NODE, nothing says otherwise
        ({"gpus_per_task": 2}, 2, "cuda:0"),
        ({"local_world_size": None, "gpus_on_node": 8}, 1, "cuda:0"),
        ({"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}, 1, "cuda:0"),
        ({"local_world_size": None}, 1, "cuda:0"),
        ({"rank": 3, "local_rank": 3, "world_size": 4, "local_world_size": None}, 8, "cuda:3"),
        ({"gpus_per_task": 2}, 4, "cuda:2"),
        ({"gpus_per_task": 2, "gpus_on_node": 4}, 4, "cuda:2"),
        ({"gpus_per_task": 2, "gpus_on_node": 4}, 2, "cuda:0"),  # bound by Slurm's --gpus-per-task=2
    ],
)
def test_choose(fields: dict[str, Any], visible: int, expected: str) -> None:
    assert device.choose(topology(**fields), visible, {}) == expected


def test_fewer_gpus_than_ranks_is_an_error_that_shows_what_is_visible() -> None:
    crowded = topology(rank=3, local_rank=3, world_size=4, local_world_size=4)
    with pytest.raises(DeviceError) as caught:
        device.choose(crowded, 2, {"CUDA_VISIBLE_DEVICES": "4,7"})
    assert "2 visible" in caught.value.found
    assert "CUDA_VISIBLE_DEVICES=4,7" in caught.value.found


def test_two_ranks_never_share_one_gpu_silently() -> None:
    with pytest.raises(DeviceError):
        device.choose(topology(gpus_on_node=1), 1, {})


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of its own; what is set for the process stays undone."""
    env: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", env)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: env.update(deterministic=str(on)))
    return env


def visible_as_cuda_has_it(env: dict[str, str]) -> Callable[[], int]:
    """How many devices there are: those in the list, but of MIG instances the first one only."""

    def count() -> int:
        entries = [entry for entry in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
        return min(len(entries), 1) if entries and entries[0].startswith("MIG-") else len(entries)

    return count


def test_gpus_that_slurm_gave_and_torch_does_not_see_are_an_error(
    process: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rank computes on the CPU, and the others wait for it in NCCL."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for count, words in ((1, "1 GPU"), (2, "2 GPUs")):
        given = topology(gpus_on_node=count)
        with pytest.raises(DeviceError) as caught:
            device.set_up(given, cuda=True, deterministic=False)
        assert caught.value.asked == f"Computing on a GPU (Slurm gave {words} on this node):"
    assert f"torch {torch.__version__} sees none (CUDA_VISIBLE_DEVICES=unset" in caught.value.found
    assert device.set_up(given, cuda=False, deterministic=False) == [torch.device("cpu")]
    assert device.set_up(topology(gpus_on_node=0), cuda=True, deterministic=False) == [torch.device("cpu")]
    process["CLUSTER_DDP_DUMMY_GPUS"] = "1"
    assert device.set_up(given, cuda=True, deterministic=False) == [torch.device("cpu")]


def test_a_driver_that_is_too_old_is_told_with_the_gpu(
    process: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML counts its GPUs all the same."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update it")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(
        DeviceError, match=r"(?s)Starting cuda:1 .*too old \(found version 12020\).*nvidia-smi"
    ) as caught:
        device.set_up(topology(), cuda=True, deterministic=False)
    assert "Please update" not in str(caught.value)


@pytest.mark.parametrize(
    ("built_for", "driver", "hint"),
    [
        (
            "13.0",
            "12020",
            'pip install "torch<2.15" torchvision --index-url https://download.pytorch.org/whl/cu126; or',
        ),
        ("13.0", "11040", "ask for a driver that has CUDA 13.0 (nvidia-smi)"),
        ("12.8", "11040", "ask for a driver that has CUDA 12.8 (nvidia-smi)"),
    ],
)
def test_the_wheel_that_fits_an_old_driver_is_named(
    process: dict[str, str], monkeypatch: pytest.MonkeyPatch, built_for: str, driver: str, hint: str
) -> None:
    """A wheel for CUDA 12.6 runs with any driver for CUDA 12, and with none for CUDA 11."""

    def fail(device: torch.device) -> None:
        raise RuntimeError(f"The NVIDIA driver on your system is too old (found version {driver}). Please update it")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(DeviceError) as caught:
        device.set_up(topology(), cuda=True, deterministic=False)
    assert caught.value.hint.startswith(hint)


def test_mig_instances_are_one_for_each_rank(process: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", visible_as_cuda_has_it(process))
    process["CUDA_VISIBLE_DEVICES"] = "MIG-aa,MIG-bb"
    assert device.set_up(topology(gpus_on_node=2), cuda=True, deterministic=False) == [torch.device("cuda", 0)]
    assert process["CUDA_VISIBLE_DEVICES"] == "MIG-bb"


def test_a_script_that_has_started_cuda_cannot_have_its_mig_instance(
    process: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked torch.cuda.is_available() before: CUDA reads the list once, and all ranks would have the first."""
    process["CUDA_VISIBLE_DEVICES"] = "MIG-aa,MIG-bb"
    monkeypatch.setattr(binding, "open_driver", lambda: "/dev/nvidia-uvm")
    with pytest.raises(DeviceError, match=r"(?s)instance MIG-bb:.*CUDA_VISIBLE_DEVICES=MIG-aa,MIG-bb.*is_available"):
        device.set_up(topology(gpus_on_node=2), cuda=True, deterministic=False)
    assert process["CUDA_VISIBLE_DEVICES"] == "MIG-aa,MIG-bb"


def test_more_ranks_than_mig_instances_are_an_error(process: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", visible_as_cuda_has_it(process))
    process["CUDA_VISIBLE_DEVICES"] = "MIG-aa,MIG-bb"
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES=MIG-aa,MIG-bb"):
        crowded = topology(rank=2, local_rank=2, world_size=3, local_world_size=3)
        device.set_up(crowded, cuda=True, deterministic=False)


def test_determinism_is_decided_with_the_device(process: dict[str, str]) -> None:
    """That is before the communicator is made, which looks at it once (NCCL_ALGO=^NVLS)."""
    device.set_up(topology(), cuda=False, deterministic=False)
    assert "deterministic" not in process
    device.set_up(topology(), cuda=False, deterministic=True)
    assert (process["CUBLAS_WORKSPACE_CONFIG"], process["deterministic"]) == (":4096:8", "True")


def test_threads_follow_the_cpus_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert device.cpu_threads(topology(cpus_per_task=4), {}) == 4
    assert device.cpu_threads(topology(cpus_per_task=64), {}) == 16
    assert device.cpu_threads(topology(), {}) == 8
    assert device.cpu_threads(topology(cpus_per_task=4), {"OMP_NUM_THREADS": "2"}) is None


def test_a_rank_with_several_gpus_needs_all_of_them() -> None:
    with pytest.raises(DeviceError, match=r"Giving local rank 1 2 GPUs of its own:\n  3 visible") as caught:
        device.choose(topology(gpus_per_task=2), 3, {})
    assert "--ntasks-per-node=N --gres=gpu:2*N" in caught.value.hint


def test_the_devices_of_a_rank_with_several_gpus(process: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    found = device.set_up(topology(gpus_per_task=2), cuda=True, deterministic=False)
    assert [str(one) for one in found] == ["cuda:2", "cuda:3"]
    found = device.set_up(topology(gpus_per_task=2), cuda=False, deterministic=False)
    assert [str(one) for one in found] == ["cpu", "cpu"]
