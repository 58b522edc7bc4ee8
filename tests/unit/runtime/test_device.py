"""Which GPU a rank takes: pure functions, so no GPU is needed to test them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cluster_ddp.errors import DeviceError
from cluster_ddp.runtime import device
from cluster_ddp.slurm.environment import Topology


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


@pytest.mark.parametrize(
    ("fields", "visible", "expected"),
    [
        ({}, 0, "cpu"),
        ({}, 2, "cuda:1"),
        ({"gpus_on_node": 2}, 2, "cuda:1"),
        # --gpus-per-task=1: SLURM_GPUS_ON_NODE counts the node's, each task sees its own only.
        ({"gpus_on_node": 2}, 1, "cuda:0"),
        ({"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}, 1, "cuda:0"),
        ({"local_world_size": None}, 1, "cuda:0"),
        ({"rank": 3, "local_rank": 3, "world_size": 4, "local_world_size": None}, 8, "cuda:3"),
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
        device.choose(topology(), 1, {})


def test_threads_follow_the_cpus_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert device.cpu_threads(topology(cpus_per_task=4), {}) == 4
    assert device.cpu_threads(topology(cpus_per_task=64), {}) == 16
    assert device.cpu_threads(topology(), {}) == 8
    assert device.cpu_threads(topology(cpus_per_task=4), {"OMP_NUM_THREADS": "2"}) is None
