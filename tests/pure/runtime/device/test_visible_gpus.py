"""What a rank's process may see: environments in, changes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.runtime.device import binding


@pytest.mark.parametrize(
    ("env", "local_rank", "changes"),
    [
        ({}, 0, {}),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 1, {}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, 1, {}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-aa"}, 0, {}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}, 0, {"CUDA_VISIBLE_DEVICES": "MIG-aa"}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-aa, MIG-bb"}, 1, {"CUDA_VISIBLE_DEVICES": "MIG-bb"}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}, 2, {}),  # more ranks than instances: refused later
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-aa/1/0,MIG-GPU-aa/2/0"}, 1, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-aa/2/0"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, {}),
    ],
)
def test_each_rank_has_a_mig_instance_of_its_own(env: dict[str, str], local_rank: int, changes: dict[str, str]) -> None:
    assert binding.own_instance(env, local_rank) == changes


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ({}, {}),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, {}),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, {}),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}, {"HIP_VISIBLE_DEVICES": "0,1"}),
        ({"ROCR_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "0"}),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, {}),  # the user's own choice among the two
    ],
)
def test_an_amd_gpu_is_not_selected_twice(env: dict[str, str], changes: dict[str, str]) -> None:
    assert binding.counted_once(env) == changes


@pytest.mark.parametrize(
    ("opened", "found"),
    [
        (["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"], None),  # NVML asks how many GPUs there are
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], "/dev/nvidia-uvm"),
        (["socket:[17]", "/dev/kfd"], "/dev/kfd"),
    ],
)
def test_an_open_driver_is_seen(tmp_path: Path, opened: list[str], found: str | None) -> None:
    for number, target in enumerate(opened):
        (tmp_path / str(number)).symlink_to(target)
    assert binding.open_driver(tmp_path) == found
