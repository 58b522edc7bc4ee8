"""Where CPU time and memory come from: control groups of both versions, /proc, and NVML's stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_ddp import processes
from cluster_ddp.runtime.profiling import cpu_and_memory
from cluster_ddp.runtime.profiling import nvml as nvml_module
from cluster_ddp.runtime.profiling.cpu_and_memory import JobProcesses, StepCgroup
from cluster_ddp.runtime.profiling.nvml import Gpus

STEP = "slurm/uid_1000/job_12/step_0"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path / "cpu,cpuacct" / STEP, cpuacct__usage="2500000000\n")
    write(tmp_path / "memory" / STEP, memory__stat="cache 9\nrss 1\ntotal_rss 5000\ntotal_shmem 300\ntotal_cache 900\n")
    text = f"9:name=systemd:/system.slice\n4:cpu,cpuacct:/{STEP}/task_1\n3:memory:/{STEP}/task_1\n"
    found = StepCgroup(text, tmp_path)
    assert (found.cpu_s(), found.memory_bytes()) == (2.5, 5300)


@pytest.mark.parametrize("job", ["job_12", "s8VX3C2QXDH900"])
def test_version_2(tmp_path: Path, job: str) -> None:
    step = f"system.slice/slurmstepd.scope/{job}/step_0"
    write(tmp_path / step, cpu__stat="usage_usec 1500000\nuser_usec 1\n", memory__stat="anon 700\nfile 99\nshmem 20\n")
    found = StepCgroup(f"0::/{step}/user/task_0\n", tmp_path)
    assert (found.cpu_s(), found.memory_bytes()) == (1.5, 720)


@pytest.mark.parametrize("text", ["0::/user.slice/user-0.slice\n", "", f"0::/{STEP}/task_0\n"])
def test_no_control_group_of_a_step(text: str, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        StepCgroup(text, tmp_path)


@pytest.mark.parametrize("file", ["memory.events", "memory/memory.oom_control"])
def test_the_kernels_kills_for_memory(file: str, tmp_path: Path) -> None:
    """Of both versions, in this process's own control groups, wherever those are."""
    assert processes.oom_kills(tmp_path) == 0
    folder, name = os.path.split(file)
    paths = {line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    for path in paths:
        write(Path(f"{tmp_path}/{folder}{path}"), **{name.replace(".", "__"): "oom 5\noom_kill 2\n"})
    assert processes.oom_kills(tmp_path) == 2 * len(paths)


def test_processes_of_a_job_count_wherever_they_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after they have ended; those of other jobs don't. What they share counts once."""
    busy = "while time.process_time() < 0.3: pass"
    code = f"import sys, time; x = bytearray(50 << 20)\n{busy}\nprint(flush=True); sys.stdin.read()"
    mark = {"SLURM_JOB_ID": f"{os.getpid()}", "SLURMD_NODENAME": "node1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **mark, "SLURMD_NODENAME": node},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for node in ("node1", "node1", "node2")
    ]
    found = JobProcesses(mark)
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    first = found.cpu_s()
    assert 0.5 < first < 3
    assert 100 << 20 < found.memory_bytes() < 200 << 20
    monkeypatch.setattr(cpu_and_memory, "_PSS_EVERY_S", 0.0)
    for process in started:
        process.communicate()
    assert found.cpu_s() == pytest.approx(first, abs=0.2)
    assert found.memory_bytes() == 0


def test_without_a_job_its_session_counts() -> None:
    found = JobProcesses({})
    before = found.cpu_s()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert found.cpu_s() - before >= 0.15
    assert found.memory_bytes() > 1 << 20


def test_the_dear_look_at_memory_is_taken_when_it_grows_or_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pages, looks = 0.0, 1000, []
    monkeypatch.setattr(cpu_and_memory, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(cpu_and_memory, "_pss", lambda pid: looks.append(pid) or len(looks))
    monkeypatch.setattr(JobProcesses, "_seen", lambda self: {(1, 0): processes.Stat("S", 0.0, 0, pages)})
    found = JobProcesses({})
    read = []
    for pages in (1000, 1000, 1500, 1505, 900):  # noqa: B007 - _seen looks at it
        read.append(found.memory_bytes())
        now_s += 1
    assert read == [1, 1, 2, 2, 2]
    now_s += 10
    assert found.memory_bytes() == 3


def power(handle: int) -> int:
    if handle == 2:
        raise RuntimeError("Not Supported")
    return 250_000


NVML = SimpleNamespace(
    NVML_TEMPERATURE_GPU=0,
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 4,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}{handle}",
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=(50, 101, 0, 7)[handle]),
    nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle << 30, total=80 << 30),
    nvmlDeviceGetPowerUsage=power,
    nvmlDeviceGetTemperature=lambda handle, sensor: 60,
    nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x40 if handle == 1 else 0x1,  # hot; idle
)
"""NVML of four GPUs. The third does not report its power."""


@pytest.mark.parametrize(
    ("env", "used"),
    [
        ({}, [0.5, 1, 0, 0.07]),
        ({"SLURM_JOB_GPUS": "1,3", "CUDA_VISIBLE_DEVICES": "0"}, [1, 0.07]),
        ({"SLURM_STEP_GPUS": "3", "SLURM_JOB_GPUS": "1,3"}, [0.07]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-22,GPU-00"}, [0, 0.5]),
        ({"SLURM_JOB_GPUS": "6,7"}, [0.5, 1, 0, 0.07]),  # the control group shows the job's only, from 0
        ({"SLURM_JOB_GPUS": "1,2,3,4"}, [0.5, 1, 0, 0.07]),  # so it does here
        ({"SLURM_JOB_GPUS": "0,7", "CUDA_VISIBLE_DEVICES": "0,1"}, [0.5, 1, 0, 0.07]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, [0.5, 1, 0, 0.07]),  # NVML's list has no parts of GPUs
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, [1]),  # CUDA stops at the first that is not there
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "1,3"}, [1, 0.07]),
    ],
)
def test_the_gpus_of_the_job(env: dict[str, str], used: list[float]) -> None:
    assert [gpu["utilization"] for gpu in Gpus(env, NVML).sample()] == used


def counting(*readings: int | None) -> SimpleNamespace:
    """NVML whose first GPU has these readings of its counter of energy, in mJ; None if it does not support it."""
    left = iter(readings)

    def energy(handle: int) -> int:
        if handle or (reading := next(left)) is None:
            raise RuntimeError("Not Supported")
        return reading

    return SimpleNamespace(**{**vars(NVML), "nvmlDeviceGetTotalEnergyConsumption": energy})


def test_the_counter_of_energy_is_read_as_differences_and_never_goes_back() -> None:
    """At 3.5 J the driver was loaded anew. A reading that failed makes two differences unknown."""
    gpus = Gpus({}, counting(1000, 3500, 200, 300, None, 900, 1900))
    found = [gpus.sample() for _ in range(6)]
    assert [one.get("energy_j") for one, *_ in found] == [2.5, None, 0.1, None, None, 1.0]
    assert not any("energy_j" in one for _, *others in found for one in others)


OWN, CHILD, STRANGERS, MPS, GONE = os.getpid(), 11, 12, 13, 1 << 22


@pytest.mark.parametrize(
    ("processes", "mig", "shared"),
    [
        ([[OWN], [CHILD], [], [GONE]], [0, 0], [False, False, False, False]),
        ([[OWN, CHILD], [STRANGERS], [MPS], []], [0, 1], [False, True, False, False]),
        ([[CHILD], [STRANGERS], [], []], [0, 0], [False] * 4),  # in a container: the numbers are others'
        ([[], [], [], []], [1, 1], [True] * 4),
        (None, None, [False] * 4),  # an older NVML
    ],
)
def test_a_gpu_that_others_use_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: list[list[int]] | None, mig: Any, shared: list[bool]
) -> None:
    """A task of the same job that has another run directory is another one, too."""
    of = {OWN: "/r", CHILD: "/r", STRANGERS: "/another", MPS: "/another"}
    for pid, run_dir in of.items():
        comm = "nvidia-cuda-mps-server" if pid == MPS else "python"
        environ = f"SLURM_JOB_ID=7\0CLUSTER_DDP_RUN_DIR={run_dir}\0"
        write(tmp_path / str(pid), comm=f"{comm[:15]}\n", environ=environ)
    monkeypatch.setattr(nvml_module, "_PROC", tmp_path)
    more: dict[str, Any] = {}
    if processes is not None:
        more["nvmlDeviceGetComputeRunningProcesses"] = lambda handle: [
            SimpleNamespace(pid=x) for x in processes[handle]
        ]
        more["nvmlDeviceGetMigMode"] = lambda handle: mig
    env = {"SLURM_JOB_ID": "7", "CLUSTER_DDP_RUN_DIR": "/r", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert Gpus(env, SimpleNamespace(**vars(NVML), **more)).shared() == shared


def test_a_gpu_that_may_not_be_opened_is_not_the_jobs() -> None:
    """NVML counts it, but gives no handle of it: NVML_ERROR_NO_PERMISSION."""

    def handle(index: int) -> int:
        if index in (0, 3):
            raise RuntimeError("Insufficient Permissions")
        return index

    nvml = SimpleNamespace(**{**vars(NVML), "nvmlDeviceGetHandleByIndex": handle})
    assert [gpu["utilization"] for gpu in Gpus({"SLURM_JOB_GPUS": "1,2"}, nvml).sample()] == [1, 0]


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    _, hot, silent, _ = Gpus({}, NVML).sample()
    assert hot == {
        "utilization": 1.0,
        "memory": 1 << 30,
        "memory_total": 80 << 30,
        "power_w": 250.0,
        "temperature_c": 60.0,
        "throttled": 1.0,
    }
    assert "power_w" not in silent and silent["throttled"] == 0
